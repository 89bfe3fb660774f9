"""How a rank meets the others of its engine: the store, who is there, the same settings everywhere, the groups."""

from __future__ import annotations

from datetime import timedelta

import msgspec

from layers import process_groups
from layers.process_groups import RankGroups, Store
from scheduler.config import EngineConfig
from scheduler.engine import EngineError, resolve_device
from scheduler.lifeline import Lifeline, Lifelines

# Settings that may differ between hosts.
_OF_THE_HOST = frozenset(
    ("node_rank", "dist_init_addr", "num_threads", "base_gpu_id", "model_path")
    + ("log_level", "log_requests", "decode_log_interval")
)
_STEPS, _OUTPUTS, _LIFELINE, _CONFIG, _PRESENT, _REFUSALS = "steps", "outputs", "lifeline", "config", "rank", "refusals"


class Peers(msgspec.Struct, frozen=True):
    """How the ranks of an engine find each other.

    store_host, store_port: of their key-value store. store_fd: its listening socket, inherited by rank 0; else -1.
    steps: prefix of the ZeroMQ addresses at which ranks of this host get their steps; a rank's number follows.
    inbound: ZeroMQ addresses bound by the API process, one a data-parallel group, for rank 0 to connect to.
    remote_outbound: where the API process takes the outputs of ranks on other hosts; empty on one host.
    """

    store_host: str
    store_port: int
    steps: str
    inbound: list[str]
    store_fd: int = -1
    remote_outbound: str = ""


def bracketed(host: str) -> str:
    """The host as it stands before a port: IPv6 addresses in brackets."""
    return f"[{host}]" if ":" in host else host


class Rendezvous:
    """Rank `rank` of replica `replica`. peers: None for an engine of one rank.

    RuntimeError when the store cannot be reached within --dist-timeout.
    """

    def __init__(self, config: EngineConfig, rank: int, replica: int, peers: Peers | None) -> None:
        self._config = config
        self._rank = rank
        self._replica = replica
        self._peers = peers
        self._store: Store | None = None
        self._lifeline: Lifeline | Lifelines | None = None
        self.local_size = config.layout().tp_size // config.nnodes
        if peers is not None:
            listen_fd = peers.store_fd if peers.store_fd >= 0 else None
            self._store = process_groups.open_store(
                peers.store_host, peers.store_port, listen_fd=listen_fd, timeout=config.dist_timeout
            )

    @property
    def is_remote(self) -> bool:
        """Whether this rank is on another host than rank 0 and the API process."""
        return self._rank >= self.local_size

    def join(self) -> RankGroups:
        """The groups of this rank; returns when all others have come. EngineError for settings that are not theirs."""
        config, layout = self._config, self._config.layout()
        local_rank = self._replica * layout.tp_size + self._rank % self.local_size
        device = resolve_device(config.device, config.base_gpu_id + local_rank)
        if self._store is None:
            groups = RankGroups(layout)
        else:
            if config.nnodes > 1:
                self._join_hosts(self._store)
            groups = process_groups.build(
                layout, self._rank, self._store, device, config.dist_timeout, local_size=self.local_size
            )
        return groups.of_replica(self._replica, config.num_replicas)

    def is_first_refusal(self, reason: str) -> bool:
        """Most refusals hit all ranks alike and are worth one line. reason: also told to rank 0's host."""
        if isinstance(self._lifeline, Lifeline):
            self._lifeline.refuse(reason)
        if self._store is None:
            return True
        try:
            return bool(self._store.add(_REFUSALS, 1) == 1) or self.is_remote
        except RuntimeError:  # the rank that holds it has said its line and is gone
            return False

    def steps_address(self) -> str:
        """Where this rank gets its steps."""
        assert self._peers is not None
        if not self.is_remote:
            return f"{self._peers.steps}{self._rank}"
        return self._get(f"{_STEPS}/{self._rank}")

    def outputs_address(self) -> str:
        """Where a rank on another host sends what it has for the API process."""
        return self._get(_OUTPUTS)

    def publish_steps(self, addresses: dict[int, str]) -> None:
        """On rank 0: where ranks on other hosts get their steps."""
        assert self._store is not None
        for rank, address in addresses.items():
            self._store.set(f"{_STEPS}/{rank}", address)

    def close(self) -> None:
        """This rank ends as was agreed."""
        if self._lifeline is not None:
            self._lifeline.close()

    def _get(self, key: str) -> str:
        assert self._store is not None
        return bytes(self._store.get(key)).decode()

    def _join_hosts(self, store: Store) -> None:
        """A lifeline first, so that whatever goes wrong afterwards is known on both hosts."""
        peers = self._peers
        assert peers is not None
        if self._rank == 0:
            self._lifeline = Lifelines(peers.store_host)
            store.set(_LIFELINE, str(self._lifeline.port))
            store.set(_OUTPUTS, peers.remote_outbound)
        elif self.is_remote:
            self._lifeline = Lifeline(peers.store_host, int(self._get(_LIFELINE)), self._rank)
        if store.add(f"{_PRESENT}/{self._rank}", 1) > 1:
            raise EngineError(f"--node-rank {self._config.node_rank} is taken by another host: each has its own")
        own = msgspec.to_builtins(self._config)
        if self._rank == 0:
            store.set(_CONFIG, msgspec.json.encode(own))
            return
        store.wait([_CONFIG], timedelta(seconds=self._config.dist_timeout))
        for field, value in msgspec.json.decode(store.get(_CONFIG)).items():
            if field not in _OF_THE_HOST and own.get(field) != value:
                flag = "--" + field.replace("_", "-")
                raise EngineError(f"{flag} is {value} on node 0 and {own.get(field)} on node {self._config.node_rank}")
