"""`lightning-solo report`: what it prints, what it refuses, and that it needs no torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from lightning_solo.cli import main
from tests.cli.commands import environment
from tests.cli.test_plan import WATCHED
from tests.messages import lines_with
from tests.report.folders import make_run


def test_it_prints_where_everything_is_and_imports_no_torch(tmp_path: Path) -> None:
    run = make_run(tmp_path / "first")
    (run / "csv" / "memory.csv").write_text("a\n1\n")
    command = [sys.executable, "-W", "error", "-c", WATCHED, "report", "first"]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    printed = done.stdout.splitlines()
    assert printed[0] == f"report: {Path('first/report.html')}"
    assert printed[-1] == f"TensorBoard: {Path('first/tensorboard/report')}"
    assert "picture: first/report/loss.png" in printed
    assert lines_with(done.stderr, "first/csv/memory.csv", "'a'")
    assert done.stderr.splitlines()[-1] == "imported: altair"
    assert (run / "report.html").stat().st_size > 100_000


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["runs/first"]),
        ([""], ["runs/first"]),
        (["a", "b"], ["'a b'"]),
        (["--open"], ["'--open'"]),
        (["gone"], ["'gone'"]),
    ],
)
def test_refused_in_words_with_exit_2(
    arguments: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["report", *arguments])
    assert caught.value.code == 2
    said = capsys.readouterr().err
    assert [word for word in words if word not in said] == []
