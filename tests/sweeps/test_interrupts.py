"""Ctrl-C and SIGTERM are counted while somebody counts, and are what they were before and after."""

from __future__ import annotations

import signal
import threading

import pytest

from lightning_solo.sweeps.interrupts import caught_signals


def test_signals_are_recorded_and_handlers_restored() -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with caught_signals() as signals:
            assert signals == []
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGTERM)
            assert signals == [signal.SIGINT, signal.SIGTERM]
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        assert signals == [signal.SIGINT, signal.SIGTERM]
    finally:
        signal.signal(signal.SIGINT, before)


def test_ignored_signal_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with caught_signals() as signals:
            signal.raise_signal(signal.SIGINT)
        assert signals == []
    finally:
        signal.signal(signal.SIGINT, before)


def test_another_thread_records_no_signal() -> None:
    entered = []

    def count() -> None:
        with caught_signals():
            entered.append(True)

    thread = threading.Thread(target=count)
    thread.start()
    thread.join()
    assert entered == [True]
