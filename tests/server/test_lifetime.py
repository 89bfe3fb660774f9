"""What a process does with the signals that stop it."""

from __future__ import annotations

import asyncio
import logging
import os
import signal

import pytest

from server.lifetime import Lifetime, SignalRepeats

pytestmark = pytest.mark.timeout(60)


def test_a_signal_that_comes_again_within_a_moment_is_one() -> None:
    arrivals = (
        (100.0, signal.SIGTERM),
        (100.002, signal.SIGTERM),
        (100.1, signal.SIGINT),
        (100.29, signal.SIGTERM),
        (100.31, signal.SIGTERM),  # counts: the moment began with the first one
        (100.35, signal.SIGINT),
        (100.6, signal.SIGTERM),
        (100.7, signal.SIGINT),
    )
    times = iter([time for time, _ in arrivals])
    repeats = SignalRepeats(lambda: next(times))
    assert [repeats.is_repeat(number) for _, number in arrivals] == [False, True, False, True, False, True, True, False]


@pytest.fixture
def long_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long a loaded machine takes, signals sent in a row are one."""
    monkeypatch.setattr("server.lifetime._REPEAT_SECONDS", 60.0)


def status_after(
    first: signal.Signals, second: signal.Signals, *, has_parent: bool = False, drained: bool = False
) -> int:
    """The exit status after two signals in a row; the second comes once the first has begun to drain.

    drained: whether the work under way ends, after both.
    """

    async def main() -> int:
        begun, work = asyncio.Event(), asyncio.Event()

        async def drain(name: str) -> None:
            logging.getLogger("test").info("%s: stopping", name)
            begun.set()
            await work.wait()

        lifetime = Lifetime(drain, has_parent=has_parent)
        lifetime.take_signals()
        os.kill(os.getpid(), first)
        os.kill(os.getpid(), first)
        await begun.wait()
        os.kill(os.getpid(), second)
        for _ in range(3):  # the signal is taken in the first turn, if it has not been yet
            await asyncio.sleep(0)
        if drained:
            work.set()
        return await lifetime.outcome

    return asyncio.run(main())


@pytest.mark.usefixtures("long_moment")
def test_two_of_one_signal_at_once_drain() -> None:
    assert status_after(signal.SIGTERM, signal.SIGTERM, drained=True) == 0


@pytest.mark.usefixtures("long_moment")
def test_another_signal_stops_at_once() -> None:
    assert status_after(signal.SIGTERM, signal.SIGINT) == 128 + signal.SIGINT


@pytest.mark.usefixtures("long_moment")
@pytest.mark.parametrize(("has_parent", "who"), [(False, ("SIGTERM", "SIGINT")), (True, ("told by the parent",) * 2)])
def test_lines_say_who_stops_the_process(
    caplog: pytest.LogCaptureFixture, has_parent: bool, who: tuple[str, str]
) -> None:
    caplog.set_level(logging.INFO)
    status_after(signal.SIGTERM, signal.SIGINT, has_parent=has_parent)
    lines = [record.getMessage() for record in caplog.records if record.name in ("test", "server.lifetime")]
    assert len(lines) == 2
    assert lines[0].startswith(who[0]) and lines[0].endswith(": stopping")
    assert lines[1].startswith(who[1]) and lines[1].endswith(": stopping at once")
    assert has_parent != ("SIG" in " ".join(lines))
