"""Started by torchrun: on each host the first of its processes starts the ranks, and the others wait for its end.

Ranks are children of a supervisor here, which notices their ends and has the HTTP server; torchrun's processes other
than the first of a host therefore only stand for them, so that torchrun sees as many processes as it asked for.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType

from server.config import ServerConfig, StartupError
from server.local_config import LocalConfig
from server.parent_link import die_with_parent
from server.router_config import RouterConfig

_CONNECT_TIMEOUT = 60.0
_RETRY_INTERVAL = 0.1


@dataclass(frozen=True)
class Launch:
    """What torchrun tells each process in its environment. name: of this launch on this host, for no other one."""

    world_size: int
    local_size: int
    node_rank: int
    local_rank: int
    master_addr: str
    master_port: int
    name: str

    @property
    def num_nodes(self) -> int:
        return self.world_size // self.local_size


def detect(environment: Mapping[str, str] = os.environ) -> Launch | None:
    """None when torchrun did not start this process."""
    run_id = environment.get("TORCHELASTIC_RUN_ID")
    if run_id is None:
        return None
    node_rank, port = environment["GROUP_RANK"], environment["MASTER_PORT"]
    return Launch(
        world_size=int(environment["WORLD_SIZE"]),
        local_size=int(environment["LOCAL_WORLD_SIZE"]),
        node_rank=int(node_rank),
        local_rank=int(environment["LOCAL_RANK"]),
        master_addr=environment["MASTER_ADDR"],
        master_port=int(port),
        # The parent tells apart two hosts of one launch that share a kernel, and two launches with one run id.
        name=f"lockstep-{run_id}-{node_rank}-{os.getppid()}",
    )


def words(launch: Launch, num_replicas: int = 1) -> list[str]:
    """Flags that say what torchrun was told; to stand before those that launch.py is given.

    num_replicas: engines that share nothing, which the processes are divided among. StartupError when they cannot be.
    """
    tp_size, rest = divmod(launch.world_size, num_replicas)
    if rest:
        raise StartupError(
            f"the number of processes that torchrun starts, {launch.world_size}, is not a multiple of the --dp-size "
            f"{num_replicas} replicas"
        )
    # The master port is taken by torchrun's own store.
    host = f"[{launch.master_addr}]" if ":" in launch.master_addr else launch.master_addr
    return [
        f"--tp-size={tp_size}",
        f"--nnodes={launch.num_nodes}",
        f"--node-rank={launch.node_rank}",
        f"--dist-init-addr={host}:{launch.master_port + 1}",
    ]


def check(config: ServerConfig | RouterConfig | LocalConfig, launch: Launch) -> None:
    """StartupError where flags of launch.py say something else than torchrun."""
    if not isinstance(config, ServerConfig):
        raise StartupError("torchrun starts the ranks of one engine: start routers and local mode without it")
    engine = config.engine
    if engine.tp_size * engine.num_replicas != launch.world_size:
        replicas = "" if engine.num_replicas == 1 else f" of each of {engine.num_replicas} replicas"
        raise StartupError(
            f"--tp-size {engine.tp_size}{replicas} is not the number of processes that torchrun starts, "
            f"{launch.world_size}: leave it out"
        )
    if (engine.nnodes, engine.node_rank) != (launch.num_nodes, launch.node_rank):
        raise StartupError("--nnodes and --node-rank go to torchrun itself, before launch.py")


class First:
    """The first process of a host. It ends with torchrun; set `status` for the others to end with."""

    def __init__(self, launch: Launch) -> None:
        die_with_parent()
        self.status = 1
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(f"\0{launch.name}")
        self._listener.listen(launch.local_size)

    def __enter__(self) -> First:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listener.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                connection, _ = self._listener.accept()
                with connection, contextlib.suppress(OSError):
                    connection.sendall(bytes([self.status % 256]))


def wait_for_first(launch: Launch) -> int:
    """Any other process of a host: the exit status of the first, 1 when it has ended without one."""
    die_with_parent()
    # torchrun tells all its processes to stop, also when the first one has ended before this one found it.
    _on_signals(signal.SIG_DFL)
    deadline = time.monotonic() + _CONNECT_TIMEOUT
    with socket.socket(socket.AF_UNIX) as connection:
        while True:
            try:
                connection.connect(f"\0{launch.name}")
                break
            except OSError:
                if time.monotonic() > deadline:
                    return 1
                time.sleep(_RETRY_INTERVAL)
        _on_signals(signal.SIG_IGN)  # the first one stops, and this one follows
        with contextlib.suppress(OSError):
            status = connection.recv(1)
            return status[0] if status else 1
    return 1


def _on_signals(handler: signal.Handlers) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handler)
