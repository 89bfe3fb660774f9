"""How much main memory this machine has left."""

from __future__ import annotations

import os


def available_memory() -> int:
    """Bytes that can be had without swapping, from the kernel's own estimate."""
    with open("/proc/meminfo") as meminfo:
        for line in meminfo:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
