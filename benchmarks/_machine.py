"""How busy the machine was during a measurement, from /proc; figures taken beside other work are worth little."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

_TICK = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100


def _busy_seconds() -> float | None:
    """CPU seconds that all processors together have spent busy since boot; None where the system does not tell."""
    try:
        fields = [int(value) for value in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    except (OSError, ValueError):
        return None
    user, nice, system, _idle, _iowait, irq, softirq, steal = fields
    return (user + nice + system + irq + softirq + steal) / _TICK


def _process_stat(pid: int) -> tuple[int, float] | None:
    """Parent id and CPU seconds (its own and those of children it has waited for); None when it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The name in parentheses may hold spaces; the fields after it are fixed.
    fields = text.rsplit(")", 1)[1].split()
    return int(fields[1]), sum(int(value) for value in fields[11:15]) / _TICK


def cpu_seconds(pid: int) -> float:
    """CPU seconds of a process and of the children it has waited for; 0 when it is gone."""
    stat = _process_stat(pid)
    return 0.0 if stat is None else stat[1]


def tree_cpu_seconds(root: int) -> float:
    """CPU seconds of a process and its living descendants."""
    return sum(tree_cpu_seconds_by_process(root).values())


def tree_cpu_seconds_by_process(root: int) -> dict[int, float]:
    """CPU seconds of a process and each of its living descendants, by process id."""
    parents: dict[int, int] = {}
    seconds: dict[int, float] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (stat := _process_stat(int(entry.name))) is not None:
            parents[int(entry.name)], seconds[int(entry.name)] = stat
    members = {root}
    grown = True
    while grown:
        children = {pid for pid, parent in parents.items() if parent in members} - members
        grown = bool(children)
        members |= children
    return {pid: seconds[pid] for pid in members if pid in seconds}


def process_age() -> float | None:
    """Seconds since this process was started, interpreter and imports included; None where the system does not tell."""
    try:
        start_ticks = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19])
        uptime = float(Path("/proc/uptime").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return None
    return uptime - start_ticks / _TICK


class MachineLoad:
    """Measures from construction to `report`.

    server_pid: root of the process tree that is being measured, where it is not this process.
    """

    def __init__(self, server_pid: int | None = None) -> None:
        self._server_pid = server_pid
        self._busy = _busy_seconds()
        self._server = tree_cpu_seconds(server_pid) if server_pid is not None else 0.0
        self._own = time.process_time()
        self._start = time.perf_counter()

    def report(self) -> dict[str, Any]:
        """Mean number of cores kept busy by this process, by the server's tree and by everything else."""
        seconds = max(time.perf_counter() - self._start, 1e-9)
        own = (time.process_time() - self._own) / seconds
        report: dict[str, Any] = {"cores": os.cpu_count(), "client_cores": round(own, 3)}
        busy_now = _busy_seconds()
        if self._busy is None or busy_now is None:
            return report
        busy = (busy_now - self._busy) / seconds
        report["busy_cores"] = round(busy, 3)
        report["load_average"] = [round(value, 2) for value in os.getloadavg()]
        if self._server_pid is not None:
            server = (tree_cpu_seconds(self._server_pid) - self._server) / seconds
            report["server_cores"] = round(server, 3)
            report["other_cores"] = round(max(busy - server - own, 0.0), 3)
        return report
