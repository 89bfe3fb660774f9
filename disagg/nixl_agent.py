"""An agent of the NIXL library, with what the library leaves to its user: the package, its settings, the memory."""

from __future__ import annotations

import importlib
import importlib.util
import ipaddress
import logging
import os
import threading
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import msgspec
import numpy as np

from disagg.base import KVArgs, TransferOptions
from disagg.mover import data_regions
from disagg.pages import Addresses

SCRATCH_BYTES = 64
_PACKAGES = ("nixl_cu13", "nixl_cu12")

_environment_lock = threading.Lock()


def load_library() -> ModuleType:
    """The NIXL package; of two the one that fits torch's CUDA version. Raises ValueError naming the extra."""
    installed = [name for name in _PACKAGES if importlib.util.find_spec(name)]
    if not installed:
        raise ValueError(
            "--disaggregation-transfer-backend nixl needs the package nixl-cu13 (or nixl-cu12): "
            "pip install 'lockstep[nixl]'"
        )
    name = installed[0]
    if len(installed) > 1:
        import torch  # takes a second, and is not needed for host memory

        if (torch.version.cuda or "").startswith("12."):
            name = installed[1]
    raise_exceptions = logging.raiseExceptions
    try:
        library = importlib.import_module(name)
    except ImportError as error:
        raise ValueError(f"--disaggregation-transfer-backend nixl: package {name} cannot be loaded: {error}") from error
    finally:
        # The import changes this for the whole process, and has each step printed to stdout.
        logging.raiseExceptions = raise_exceptions
    if "NIXL_LOG_LEVEL" not in os.environ:
        logging.getLogger("nixl").setLevel(logging.WARNING)
    return library


class Endpoint(msgspec.Struct, frozen=True):
    """How a prefill rank reaches a decode rank's memory: agent metadata, kind of memory, bytes to try a write on."""

    agent: bytes
    segment: str
    device_id: int
    scratch_address: int


class Agent:
    """A NIXL agent for the memory of one rank; it takes one call at a time. ValueError where it cannot use the memory.

    segment, device_id: NIXL's names of that memory. scratch: host bytes that a peer may write to at any time.
    """

    def __init__(self, kv_args: KVArgs, options: TransferOptions) -> None:
        library = load_library()
        kind, _, number = kv_args.device.partition(":")
        if kind not in ("cpu", "cuda"):
            raise ValueError(f"the nixl backend moves cpu and cuda memory, kv_args.device is {kv_args.device!r}")
        self.segment = "DRAM" if kind == "cpu" else "VRAM"
        self.device_id = int(number or 0)
        self.scratch = np.zeros(SCRATCH_BYTES, dtype=np.uint8)
        try:
            with _ucx_settings(options):
                config = library.nixl_agent_config(enable_prog_thread=False, backends=[])
                self.nixl: Any = library.nixl_agent(f"lockstep-{uuid.uuid4().hex}", config)
                self.nixl.create_backend("UCX", {})
            self._registered = [
                self.nixl.register_memory(descriptors(*data_regions(kv_args), self.device_id), self.segment),
                self.nixl.register_memory(descriptors([self.scratch.ctypes.data], [SCRATCH_BYTES], 0), "DRAM"),
            ]
        except Exception as error:  # the library's exceptions have no base class of their own
            raise ValueError(f"NIXL cannot use the memory of {kv_args.device}: {error_text(error)}") from error

    def endpoint(self) -> bytes:
        metadata: bytes = self.nixl.get_agent_metadata()
        return msgspec.msgpack.encode(Endpoint(metadata, self.segment, self.device_id, self.scratch.ctypes.data))

    def close(self) -> None:
        for registered in self._registered:
            self.nixl.deregister_memory(registered)
        self._registered = []
        self.nixl = None


def use_device(device: str) -> None:
    """Make the CUDA context of a rank's memory current in this thread; UCX copies with it."""
    if device != "cpu":
        import torch

        torch.cuda.set_device(torch.device(device).index or 0)


def descriptors(ptrs: Sequence[int] | Addresses, lens: Sequence[int] | Addresses, device_id: int) -> Addresses:
    """[M, 3] descriptors: address, length in bytes, device number."""
    rows_M3 = np.empty((len(ptrs), 3), dtype=np.uint64)
    rows_M3[:, 0], rows_M3[:, 1], rows_M3[:, 2] = ptrs, lens, device_id
    return rows_M3


@contextmanager
def _ucx_settings(options: TransferOptions) -> Iterator[None]:
    """UCX takes these from the environment only, when an agent is made. What the user has set stays as it is."""
    wanted = {"UCX_LOG_LEVEL": "error"}
    if options.host == "localhost" or _is_loopback(options.host):
        # Whoever reaches a port of UCX can write into the memory.
        wanted["UCX_NET_DEVICES"] = "lo"
    if not options.same_host_path:
        wanted["UCX_TLS"] = "^shm"
    with _environment_lock:
        added = {name: value for name, value in wanted.items() if name not in os.environ}
        os.environ.update(added)
        try:
            yield
        finally:
            for name in added:
                del os.environ[name]


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def error_text(error: Exception) -> str:
    return str(error) or type(error).__name__
