"""Signals are recorded within the context, and have their former handlers after it."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from lightning_solo.signals import STOPS, caught_signals


@pytest.fixture
def handler(request: pytest.FixtureRequest) -> Iterator[None]:
    before = signal.signal(signal.SIGINT, request.param)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("handler", [signal.default_int_handler], indirect=True)
def test_signals_are_recorded_and_handlers_restored(handler: None) -> None:
    with caught_signals() as signals:
        assert signals == []
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
        assert signals == [signal.SIGINT, signal.SIGTERM]
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert signals == [signal.SIGINT, signal.SIGTERM]


@pytest.mark.parametrize("handler", [signal.SIG_IGN], indirect=True)
def test_ignored_signal_stays_ignored(handler: None) -> None:
    with caught_signals() as signals:
        signal.raise_signal(signal.SIGINT)
    assert signals == []


def test_another_thread_records_no_signal() -> None:
    with ThreadPoolExecutor() as pool:
        assert pool.submit(lambda: caught_signals().__enter__()).result() == []


@pytest.mark.parametrize("handler", [signal.default_int_handler], indirect=True)
def test_second_request_to_end_is_passed_on(handler: None) -> None:
    repeated: list[int] = []
    with caught_signals((signal.SIGUSR1, *STOPS), repeated.append) as signals:
        for number in (signal.SIGUSR1, signal.SIGUSR1, signal.SIGTERM, signal.SIGUSR1):
            signal.raise_signal(number)
        assert repeated == []
        signal.raise_signal(signal.SIGINT)
    assert repeated == [signal.SIGINT]
    assert signals[-1] == signal.SIGINT


def test_process_that_ends_at_once_has_the_status_of_the_signal_and_cleans_nothing_up() -> None:
    code = """
import atexit, signal
from lightning_solo.signals import STOPS, caught_signals, end_at_once
atexit.register(print, "cleaned up")
with caught_signals(repeated=end_at_once):
    signal.raise_signal(signal.SIGTERM)
    print("recorded", flush=True)
    signal.raise_signal(signal.SIGTERM)
    print("still here", flush=True)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.returncode) == ("recorded\n", 143)
