"""Wake-ups and time limits."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from disagg.wake import Alarms, Wake
from tests.disagg.support import wait_until

pytestmark = pytest.mark.timeout(120)


def test_wake_is_readable_until_drained_and_silent_once_closed() -> None:
    wake = Wake()
    assert not select.select([wake.fd], [], [], 0)[0]
    wake.notify()
    wake.notify()
    assert os.eventfd_read(wake.fd) == 2
    wake.close()
    # The number now belongs to somebody else, who must not find it readable.
    other = os.eventfd(0, os.EFD_NONBLOCK)
    try:
        wake.notify()
        wake.close()
        assert not select.select([other], [], [], 0)[0]
    finally:
        os.close(other)


@contextmanager
def held(alarms: Alarms) -> Iterator[None]:
    """Inside the block none rings, though its time has come."""
    is_held, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        is_held.set()
        assert go_on.wait(60)

    alarms.after(0, hold)
    assert is_held.wait(60)
    yield
    go_on.set()


def test_alarms_ring_in_the_order_of_their_times_unless_cancelled() -> None:
    alarms = Alarms("test")
    rung: list[str] = []
    done = threading.Event()
    try:
        with held(alarms):
            alarms.after(0.05, done.set)
            alarms.after(-100, lambda: rung.append("second"))
            alarms.after(-300, lambda: rung.append("first"))
            alarms.after(-200, lambda: rung.append("never")).cancel()
        assert done.wait(60)
        assert rung == ["first", "second"]
    finally:
        alarms.close()


def test_cancelled_alarms_are_not_kept_until_their_time() -> None:
    alarms = Alarms("test")
    try:
        kept = alarms.after(3600, lambda: None)
        for _ in range(20_000):
            alarms.after(3600, lambda: None).cancel()
        assert len(alarms._heap) <= 1024
        assert any(alarm is kept for _, _, alarm in alarms._heap)
    finally:
        alarms.close()


def test_closed_alarms_never_ring() -> None:
    alarms = Alarms("test")
    rung = threading.Event()
    closing = threading.Thread(target=alarms.close)
    with held(alarms):
        alarms.after(0, rung.set)
        closing.start()
        wait_until(lambda: alarms._closed)
    for thread in (closing, alarms._thread):
        thread.join(60)
        assert not thread.is_alive()
    assert not rung.is_set()


def test_an_alarm_that_raises_does_not_keep_others_from_ringing(caplog: pytest.LogCaptureFixture) -> None:
    alarms = Alarms("test")
    done = threading.Event()
    try:
        alarms.after(0.01, lambda: 1 // 0)  # type: ignore[arg-type, return-value]
        alarms.after(0.05, done.set)
        assert done.wait(60)
        assert "ZeroDivisionError" in caplog.text
    finally:
        alarms.close()
