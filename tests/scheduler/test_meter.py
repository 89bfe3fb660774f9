"""Status lines of a rank."""

from __future__ import annotations

import logging
import math
from types import SimpleNamespace
from typing import Any

import pytest

from scheduler.messages import LoadReport
from scheduler.rank import Meter


def make_meter(load: LoadReport, *, is_idle: bool) -> tuple[Meter, Any]:
    engine: Any = SimpleNamespace(is_idle=is_idle, scheduler=SimpleNamespace(load=lambda rank: load))
    return Meter(engine, 0, 0.0), engine


def test_work_has_a_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    meter, _ = make_meter(LoadReport(running_requests=2, waiting_requests=1, total_tokens=100), is_idle=False)
    meter.log_status()
    assert [record.message[:21] for record in caplog.records] == ["running 2, waiting 1,"]


def test_the_last_tokens_have_a_line_and_steps_without_work_have_none(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    meter, engine = make_meter(LoadReport(generated_tokens_total=5, total_tokens=100), is_idle=True)
    meter.log_status()
    assert len(caplog.records) == 1
    meter.log_status()
    assert len(caplog.records) == 1
    engine.is_idle = False
    meter.log_status()
    assert len(caplog.records) == 2


def test_becoming_busy_and_becoming_idle_are_reported_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scheduler.rank._REPORT_INTERVAL", math.inf)
    load = LoadReport(running_requests=2, total_tokens=100)
    meter, engine = make_meter(load, is_idle=True)
    reports = []
    for engine.is_idle in (True, False, False, True, True):
        reports.append(meter.report())
    assert reports == [None, load, None, load, None]
    assert meter.report(force=True) == load
