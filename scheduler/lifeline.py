"""Connections between rank 0 and the ranks on other hosts, whose end tells of the end of the rank behind them.

On one host the parent process sees its ranks end. Between hosts nothing would: a rank that waits for its next step
reads from a peer that it cannot see die. A connection of its own is closed by the kernel when its process ends, however
that is, and kept alive by probes, which fail when the host is gone.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time

import msgspec

from scheduler.messages import STATUS_PEER_LOST

# Time for a rank to end after rank 0 has, as agreed.
_FAREWELL_GRACE = 10.0
# A host that has not answered for 2 + 3 * 2 seconds is gone.
_KEEPALIVE = {socket.TCP_KEEPIDLE: 2, socket.TCP_KEEPINTVL: 2, socket.TCP_KEEPCNT: 3, socket.TCP_USER_TIMEOUT: 8000}
_STATUS_REFUSED = 2


class _Word(msgspec.Struct, omit_defaults=True):
    """What a rank says, a line of JSON each: who it is, and later why it ends. farewell: as was agreed."""

    rank: int
    farewell: bool = False
    refusal: str = ""


class Lifelines:
    """Rank 0's end. `port` is where the other hosts' ranks connect, at `host`. last_word: see `Peers`."""

    def __init__(self, host: str, last_word: int = -1) -> None:
        self._last_word = last_word
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=1024)
        self.port: int = self._listener.getsockname()[1]
        self._connections: list[socket.socket] = []
        threading.Thread(target=self._accept, name="lifelines", daemon=True).start()

    def refuse(self, reason: str) -> None:
        """This rank ends because of `reason`, one line that the other hosts are to show too."""
        for connection in self._connections:
            _say(connection, _Word(0, refusal=reason))

    def close(self) -> None:
        """This rank ends as agreed."""
        for connection in self._connections:
            _say(connection, _Word(0, farewell=True))

    def _accept(self) -> None:
        while True:
            connection, address = self._listener.accept()
            _keep_alive(connection)
            self._connections.append(connection)
            watch = (connection, 0, None, address[0], self._last_word)
            threading.Thread(target=_watch, args=watch, name="lifeline", daemon=True).start()


class Lifeline:
    """The end of a rank on another host than rank 0's. OSError when rank 0 cannot be reached.

    last_word: see `Peers`.
    """

    def __init__(self, host: str, port: int, rank: int, last_word: int = -1) -> None:
        self._rank = rank
        self._connection = socket.create_connection((host, port), timeout=10)
        self._connection.settimeout(None)
        _keep_alive(self._connection)
        _say(self._connection, _Word(rank))
        watch = (self._connection, rank, 0, host, last_word)
        threading.Thread(target=_watch, args=watch, name="lifeline", daemon=True).start()

    def refuse(self, reason: str) -> None:
        """This rank ends because of `reason`, one line that the other host is to show too."""
        _say(self._connection, _Word(self._rank, refusal=reason))

    def close(self) -> None:
        """This rank ends as agreed."""
        _say(self._connection, _Word(self._rank, farewell=True))


def _say(connection: socket.socket, word: _Word) -> None:
    try:
        connection.sendall(msgspec.json.encode(word) + b"\n")
    except OSError:
        return  # the other side is gone, which its watcher notices


def _keep_alive(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE.items():
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def leave_word(last_word: int, reason: str) -> None:
    """The parent process reads it once this process has ended. last_word: see `Peers`."""
    if last_word >= 0:
        os.write(last_word, reason.encode() + b"\n")


def _watch(connection: socket.socket, own: int, peer: int | None, host: str, last_word: int) -> None:
    """Ends this process, with one line, when the other side ends without farewell, or rank 0 with one but alone.

    host: address of the other side.
    """
    status, reason = STATUS_PEER_LOST, f"is gone, on host {host}"
    try:
        with connection.makefile("rb") as lines:
            for line in lines:
                word = msgspec.json.decode(line, type=_Word)
                peer = word.rank
                if word.farewell and own == 0:
                    return
                if word.farewell:
                    time.sleep(_FAREWELL_GRACE)
                    reason = f"has ended, and this rank has not heard why within {_FAREWELL_GRACE:g} s"
                    break
                if word.refusal:
                    status, reason = _STATUS_REFUSED, word.refusal
    except (OSError, msgspec.DecodeError) as error:
        reason = f"is gone, on host {host} ({error})"
    if peer is None:
        return  # somebody else who looked at the port
    if status == _STATUS_REFUSED:
        print(f"error: rank {peer}: {reason}", file=sys.stderr, flush=True)
    else:
        print(f"error: rank {own} cannot go on without the others: rank {peer} {reason}", file=sys.stderr, flush=True)
        leave_word(last_word, f"rank {peer} {reason}")
    os._exit(status)
