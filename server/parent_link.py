"""A server as one of a group: what it takes from the parent that started it, and what it tells that parent."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
from contextlib import AbstractContextManager

import msgspec

from scheduler import config
from server.config import ChildReady, ParentLink

_PR_SET_PDEATHSIG = 1


def attach(link: ParentLink) -> None:
    """From now on this process is killed when its parent ends, whatever ends it."""
    die_with_parent()
    if os.getppid() != link.parent_pid:
        sys.exit("error: the parent process is already gone")


def refusing(link: ParentLink | None) -> AbstractContextManager[bool]:
    """See `scheduler.config.refusing`. link: None for a server that is in no group."""
    return config.refusing(-1 if link is None else link.refusals)


def die_with_parent() -> None:
    """Asks the kernel for it; a parent that ended before goes unnoticed."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def listener(descriptor: int) -> socket.socket:
    """The listening socket that was passed on."""
    os.set_inheritable(descriptor, False)
    return socket.socket(fileno=descriptor)


def announce(link: ParentLink, ready: ChildReady) -> None:
    """Tells the parent that requests can be taken; to be called once."""
    with os.fdopen(link.status, "wb") as status:
        status.write(msgspec.json.encode(ready) + b"\n")
