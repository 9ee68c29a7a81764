"""Children: messages in both directions, how a child ended, and children that end with their parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from lightning_solo.processes import ProcessError, fork, is_running, oom_kills, reply, start


class UnloadableError(Exception):
    """Can be pickled, but not loaded."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(one + two)


def raises(error: Exception) -> Any:
    raise error


def echo(connection: Connection, *arguments: Any) -> None:
    """Send the arguments and the standard input, then what is received; an exception ends the process."""
    connection.send((arguments, sys.stdin.read()))
    while True:
        message = connection.recv()
        print("noise", flush=True)
        exec(message) if isinstance(message, str) else connection.send(message)


@pytest.fixture
def standard_input() -> Iterator[None]:
    """A standard input that isn't empty."""
    before = os.dup(0)
    reader, writer = os.pipe()
    os.write(writer, b"for the parent\n")
    os.close(writer)
    os.dup2(reader, 0)
    yield
    os.dup2(before, 0)
    os.close(before)
    os.close(reader)


@pytest.mark.usefixtures("standard_input")
def test_a_fresh_interpreter_receives_arguments_and_answers() -> None:
    child = start("tests.test_processes:echo", 1, Path("a"))
    assert child.receive() == ((1, Path("a")), "")
    with pytest.raises(TimeoutError):
        child.receive(timeout_s=0.01)
    child.send(["x" * 10**6])
    assert child.receive() == ["x" * 10**6], "not the noise that it prints"
    child.send("connection.send(ValueError('in the child'))")
    with pytest.raises(ValueError, match="in the child"):
        child.receive()
    assert child.close() == -signal.SIGKILL


@pytest.mark.parametrize(
    ("code", "how", "last"),
    [
        ("print('last words', flush=True); os._exit(3)", "exit status 3", "noise\nlast words"),
        ("os.abort()", "SIGABRT", "noise"),
        ("os.kill(os.getpid(), 9)", "SIGKILL", "noise"),
    ],
)
def test_death_is_an_error_that_says_how_and_what_was_printed_last(code: str, how: str, last: str) -> None:
    child = start("tests.test_processes:echo")
    child.receive()
    child.send(["noise of an earlier message"])
    child.receive()
    child.send(f"import os; {code}")
    for communicate in (child.receive, child.receive):
        with pytest.raises(ProcessError) as caught:
            communicate()
        first, _, printed = str(caught.value).partition(":\n")
        assert first.startswith(how)
        assert printed == last
    with pytest.raises(ProcessError):
        child.send("")
    child.close()


def test_kernels_count_is_read(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "vmstat").write_text("nr_free_pages 5\noom_kill 7\noom_kill_other 3\n")
    assert oom_kills(tmp_path) == 7
    assert oom_kills(tmp_path / "nowhere") == 0


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda: raises(UnloadableError(1, 2)), "UnloadableError: 3"),
        (lambda: lambda: None, "PicklingError|AttributeError"),
    ],
    ids=["exception", "result"],
)
def test_reply_that_cannot_be_pickled_is_described(function: Callable[[], Any], said: str) -> None:
    child = fork(lambda connection: reply(connection, function))
    with pytest.raises(ProcessError, match=said):
        child.receive()
    assert child.wait() == 0
    child.close()


def test_exception_of_a_fork_is_printed_and_its_exit_status_is_1(capfd: pytest.CaptureFixture[str]) -> None:
    child = fork(lambda _: raises(OSError("unexpected")))
    assert child.wait() == 1
    assert "OSError: unexpected" in capfd.readouterr().err
    child.close()


def test_close_kills_the_group_of_a_child() -> None:
    child = start("tests.test_processes:echo")
    child.receive()
    child.send("import subprocess; connection.send(subprocess.Popen(['sleep', '1000']).pid)")
    grandchild = child.receive()
    assert is_running(grandchild)
    child.close()
    assert_ends(grandchild)


PARENT = """
import os, time
from lightning_solo.processes import {how}
child = {how}({function})
print(child.pid, flush=True)
child.receive()
os._exit(0)
"""
SLEEPS = "lambda connection: [connection.send(1), time.sleep(1000)]"


@pytest.mark.parametrize(("how", "function"), [("start", "'tests.test_processes:echo'"), ("fork", SLEEPS)])
def test_child_ends_with_its_parent(how: str, function: str) -> None:
    code = PARENT.format(how=how, function=function)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, check=True)
    assert_ends(int(done.stdout))


def assert_ends(pid: int) -> None:
    deadline = time.monotonic() + 500
    while is_running(pid):  # a killed process takes a moment
        assert time.monotonic() < deadline
        time.sleep(0.01)
