"""Ctrl-C and SIGTERM are counted while somebody counts, and are what they were before and after."""

from __future__ import annotations

import signal
import threading

import pytest

from lightning_solo.sweeps.interrupts import Interrupts


def test_signals_are_counted_and_then_as_before() -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        interrupts = Interrupts()
        with interrupts.counted():
            interrupts.check()
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGTERM)
            assert interrupts.count == 2
            with pytest.raises(KeyboardInterrupt):
                interrupts.check()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        assert interrupts.count == 2
    finally:
        signal.signal(signal.SIGINT, before)


def test_what_is_ignored_stays_so() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        interrupts = Interrupts()
        with interrupts.counted():
            signal.raise_signal(signal.SIGINT)
        assert interrupts.count == 0
    finally:
        signal.signal(signal.SIGINT, before)


def test_in_another_thread_no_signal_arrives() -> None:
    entered = []

    def count() -> None:
        with Interrupts().counted():
            entered.append(True)

    thread = threading.Thread(target=count)
    thread.start()
    thread.join()
    assert entered == [True]
