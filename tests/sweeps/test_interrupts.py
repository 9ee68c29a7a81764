"""Ctrl-C and SIGTERM are counted while somebody counts, and are what they were before and after."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from lightning_solo.sweeps.interrupts import caught_signals


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
