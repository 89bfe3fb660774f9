"""One engine of the Mooncake library, with what the library leaves to its user.

An engine listens on two ports of its own choosing, on all addresses, and whoever reaches them may write into the memory
registered with it. The library cannot cut off one peer, but destroying an engine ends everything that goes through it,
so an engine here belongs to one pair of ranks and lives as long as their connection.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import socket
import threading
from collections.abc import Sequence
from typing import Any

from disagg.mover import Pieces

_DONE, _RUNNING = 1, 0
# What a write that could not be posted gives, by version; asking for the state of -1 would crash the process.
_NO_BATCH = (0, 2**64 - 1)
_QUIETEST_NAME, _SILENT = "ERROR", 3
_LOG_LEVEL_SYMBOL = "_ZN3fLI17FLAGS_minloglevelE"
_FIRST_PAUSE, _LONGEST_PAUSE = 50e-6, 500e-6


def load_library(device: str, rdma_devices: str) -> Any:
    """The module mooncake.engine, set up for TCP or RDMA. ValueError says what to install.

    The library reads its settings from the environment of the process.
    """
    os.environ.setdefault("MC_LOG_LEVEL", _QUIETEST_NAME)
    if rdma_devices:
        os.environ.pop("MC_FORCE_TCP", None)
    else:
        # Without this the library takes RDMA wherever it finds a device.
        os.environ["MC_FORCE_TCP"] = "1"
    try:
        library = importlib.import_module("mooncake.engine")
    except ModuleNotFoundError as error:
        raise ValueError(
            "--disaggregation-transfer-backend mooncake needs a package that is not installed: "
            "pip install 'lockstep[mooncake]', on hosts with CUDA 'lockstep[mooncake-cuda]'"
        ) from error
    except ImportError as error:
        raise ValueError(
            f"--disaggregation-transfer-backend mooncake cannot load its library: {error}; "
            "the Debian and Ubuntu packages are libibverbs1, on hosts with CUDA also ibverbs-providers"
        ) from error
    if device != "cpu" and not library.SUPPORT_CUDA:
        raise ValueError(
            f"the installed mooncake package moves host memory only, kv_args.device is {device!r}: "
            "pip install 'lockstep[mooncake-cuda]' in its place"
        )
    _silence(library)
    return library


def _silence(library: Any) -> None:
    """It prints nothing from here on, unless MC_LOG_LEVEL asks for more than errors: what fails we say ourselves."""
    if os.environ["MC_LOG_LEVEL"] == _QUIETEST_NAME:
        with contextlib.suppress(ValueError):
            ctypes.c_int32.in_dll(ctypes.CDLL(library.__file__), _LOG_LEVEL_SYMBOL).value = _SILENT


class Engine:
    """`name` is what a peer needs to reach it. Raises OSError if it cannot start. Not safe to use from two threads."""

    def __init__(self, library: Any, host: str, rdma_devices: str) -> None:
        self._engine = library.TransferEngine()
        protocol = "rdma" if rdma_devices else "tcp"
        try:
            failed = self._engine.initialize(host, "P2PHANDSHAKE", protocol, rdma_devices)
        except RuntimeError as error:
            raise OSError(f"mooncake cannot start over {protocol} on {host}: {error}") from error
        _silence(library)  # some versions set the level anew with every engine
        if failed:
            raise OSError(f"mooncake cannot start over {protocol} on {host}: error {failed}")
        self._port: int = self._engine.get_rpc_port()
        self.name = f"{host}:{self._port}"
        topology = self._engine.get_local_topology() if rdma_devices else ""
        for device in filter(None, rdma_devices.split(",")):
            if f'"{device}"' not in topology:
                self.close()
                raise OSError(f"mooncake finds no RDMA device {device!r} (flag --disaggregation-ib-device)")

    def register(self, ptrs: Sequence[int], lens: Sequence[int]) -> None:
        """Let peers write there (over RDMA: also send from there). Regions must not overlap."""
        if self._engine.batch_register_memory(list(ptrs), list(lens)):
            self.close()
            raise OSError(f"mooncake cannot register {len(ptrs)} memory regions of {sum(lens)} bytes")

    def probe(self, peer: str) -> None:
        if self._engine.send_probe(peer):
            raise OSError(f"the mooncake engine at {peer} does not answer")

    def post(self, peer: str, pieces: Pieces) -> Write:
        """Begin to write the pieces. All of them, at most about 1000 at once, wait in the library's queue."""
        sources, targets, lengths = (array.tolist() for array in pieces)
        batch = 0
        if len(sources) > 1:
            batch = self._engine.batch_transfer_async_write(peer, sources[:-1], targets[:-1], lengths[:-1])
            if batch in _NO_BATCH:
                raise OSError(f"mooncake cannot write to {peer}")
        last = self._engine.transfer_submit_write(peer, sources[-1], targets[-1], lengths[-1])
        if last in _NO_BATCH:
            raise OSError(f"mooncake cannot write to {peer}")
        return Write(self._engine, peer, batch, last)

    def close(self) -> None:
        """When this returns nothing can be written through the engine any more, whatever its peer does.

        The destructor keeps the interpreter lock while it joins the thread that accepts connections, which may be about
        to wait a second for the next one, or five for a stranger to say something. So both are taken from it first.
        """
        for accepting in (True, False):
            for sock in _sockets_at(self._port, accepting):
                with sock, contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
        self._engine = None


class Write:
    """Pieces under way. The library can only wait for a batch by spinning, so the last piece travels on its own: it is
    asked for from time to time, and when it has arrived the batch before it has all but arrived too.
    """

    def __init__(self, engine: Any, peer: str, batch: int, last: int) -> None:
        self._engine = engine
        self._peer = peer
        self._batch = batch
        self._last = last

    def wait(self, stop: threading.Event) -> bool:
        """True once every byte lies in the peer's memory, False if `stop` was set first. Raises OSError if one failed.

        Unless it gives True, bytes may still be on their way.
        """
        pause = _FIRST_PAUSE
        while (status := self._engine.transfer_check_status(self._last)) == _RUNNING:
            if stop.wait(pause):
                return False
            pause = min(2 * pause, _LONGEST_PAUSE)
        if status != _DONE or (self._batch and self._engine.get_batch_transfer_status([self._batch])):
            raise OSError(f"mooncake cannot write to {self._peer}")
        return True


def _sockets_at(port: int, accepting: bool) -> list[socket.socket]:
    """TCP sockets of this process at its own `port`, that listen or that were accepted, as duplicates to be closed."""
    found = []
    for entry in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{entry}").startswith("socket:"):
                continue
            duplicate = os.dup(int(entry))
        except OSError:
            continue
        try:
            sock = socket.socket(fileno=duplicate)
        except OSError:  # the number has just been given to something else
            os.close(duplicate)
            continue
        if (
            sock.family in (socket.AF_INET, socket.AF_INET6)
            and sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) == accepting
            and sock.getsockname()[1] == port
        ):
            found.append(sock)
        else:
            sock.close()
    return found
