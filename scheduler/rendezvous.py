"""How a rank meets the others of its engine: the store, who is there, the same settings everywhere, the groups."""

from __future__ import annotations

import socket
import time
from datetime import timedelta
from typing import Any

import msgspec
import torch

from layers import process_groups
from layers.process_groups import RankGroups, Store
from scheduler.config import EngineConfig, HandOverAddress, Peers, bracketed
from scheduler.engine import EngineError, resolve_device
from scheduler.lifeline import Lifeline, Lifelines
from scheduler.revision import Revision

# Settings that may differ between hosts.
_OF_THE_HOST = frozenset(
    ("node_rank", "dist_init_addr", "num_threads", "base_gpu_id", "model_path")
    + ("log_level", "log_requests", "decode_log_interval")
)
# Keys of the store. Ranks are in it by their numbers among those of all replicas.
_STEPS, _INBOUND, _OUTPUTS, _LIFELINE, _CONFIG = "steps", "inbound", "outputs", "lifeline", "config"
_PRESENT, _REFUSALS, _HAND_OVER, _READY, _GROUPS = "rank", "refusals", "hand over", "ready", "groups"

# While another host is not there yet.
_CONNECT_TIMEOUT, _RETRY_INTERVAL = 5.0, 0.2


class _SharedAddress(msgspec.Struct, frozen=True):
    """What ranks of a prefill or decode server on other hosts have to know; fields of a HandOverAddress."""

    bootstrap: str
    incarnation: str


class Rendezvous:
    """Rank `rank` of replica `replica`. peers: None for an engine of one rank on one host."""

    def __init__(self, config: EngineConfig, rank: int, replica: int, peers: Peers | None) -> None:
        self._config = config
        self._layout = config.layout()
        self._rank = rank
        self._replica = replica
        self._number = replica * self._layout.tp_size + rank
        self._peers = peers
        self._store: Store | None = None
        self._lifeline: Lifeline | Lifelines | None = None

    @property
    def is_remote(self) -> bool:
        """Whether this rank is on another host than the API process."""
        return self._node(self._rank) > 0

    def shares_host(self, rank: int) -> bool:
        """Whether that rank of the replica is on this host."""
        return self._node(rank) == self._node(self._rank)

    def join(self) -> RankGroups:
        """The groups of this rank; returns when all others have come.

        EngineError for settings that are not theirs, and when a node does not come within --dist-timeout.
        """
        config, size = self._config, self._config.ranks_per_node
        store = self._store = self._open_store()
        if store is not None and config.nnodes > 1:
            self._open_lifeline(store)  # whatever goes wrong from here on is known on both hosts
        device = resolve_device(config.device, config.base_gpu_id + self._number % size)
        if store is None:
            groups = RankGroups(self._layout)
        else:
            if config.nnodes > 1:
                self._compare_hosts(store, device)
            own_store = process_groups.prefixed(store, f"{_GROUPS}/{self._replica}")
            groups = process_groups.build(
                self._layout,
                self._rank,
                own_store,
                device,
                config.dist_timeout,
                local_size=min(size, self._layout.tp_size),
            )
        return groups.of_replica(self._replica, config.num_replicas, size)

    def is_first_refusal(self, reason: str) -> bool:
        """Most refusals hit all ranks alike and are worth one line. reason: also told to the other hosts."""
        if self._lifeline is not None:
            self._lifeline.refuse(reason)
        if self._store is None:
            return True
        try:
            return bool(self._store.add(_REFUSALS, 1) == 1) or self.is_remote
        except RuntimeError:  # the rank that holds it has said its line and is gone
            return False

    def complete(self, address: HandOverAddress | None) -> HandOverAddress | None:
        """The address of a rank of a prefill or decode server, with what the API process alone knows; after `join`."""
        if address is None or self._store is None or self._config.nnodes == 1:
            return address
        if self._number == 0:
            shared = _SharedAddress(address.bootstrap, address.incarnation)
            self._store.set(_HAND_OVER, msgspec.json.encode(shared))
        if not self.is_remote:
            return address
        shared = msgspec.json.decode(self._get(_HAND_OVER), type=_SharedAddress)
        return msgspec.structs.replace(address, bootstrap=shared.bootstrap, incarnation=shared.incarnation)

    def inbound_addresses(self) -> list[str]:
        """On rank 0 of a replica: where its data-parallel groups get what the API process says."""
        assert self._peers is not None
        if not self.is_remote:
            return self._peers.inbound
        addresses = msgspec.json.decode(self._get(_INBOUND), type=list[str])
        return addresses[self._replica * self._layout.dp_size : (self._replica + 1) * self._layout.dp_size]

    def steps_address(self) -> str:
        """Where this rank gets its steps."""
        assert self._peers is not None
        return f"{self._peers.steps}{self._rank}" if self.shares_host(0) else self._get(f"{_STEPS}/{self._number}")

    def bind_address(self, rank: int) -> str:
        """On rank 0 of a replica: where to give another of its ranks steps; port * lets the system choose."""
        assert self._peers is not None
        return f"{self._peers.steps}{rank}" if self.shares_host(rank) else f"tcp://{bracketed(self._peers.own_host)}:*"

    def outputs_address(self) -> str:
        """Where a rank on another host sends what it has for the API process."""
        return self._get(_OUTPUTS)

    def publish_steps(self, addresses: dict[int, str]) -> None:
        """On rank 0 of a replica: where each of its ranks gets its steps."""
        assert self._store is not None
        for rank, address in addresses.items():
            if not self.shares_host(rank):
                self._store.set(f"{_STEPS}/{self._number + rank}", address)

    def say_ready(self) -> None:
        """This rank can serve. On other hosts than that of the API process it waits until the first rank of all can."""
        if self._store is None or self._config.nnodes == 1:
            return
        if self._number == 0:
            self._store.set(_READY, "")
        elif self.is_remote:
            self._get(_READY)

    def close(self) -> None:
        """This rank ends as was agreed."""
        if self._lifeline is not None:
            self._lifeline.close()

    def _node(self, rank: int) -> int:
        return (self._number - self._rank + rank) // self._config.ranks_per_node

    def _get(self, key: str) -> str:
        assert self._store is not None
        return bytes(self._store.get(key)).decode()

    def _open_store(self) -> Store | None:
        peers, timeout = self._peers, self._config.dist_timeout
        if peers is None:
            return None
        if self.is_remote:
            self._wait_for_node_0(peers)
        listen_fd = peers.store_fd if peers.store_fd >= 0 else None
        try:
            return process_groups.open_store(peers.store_host, peers.store_port, listen_fd=listen_fd, timeout=timeout)
        except RuntimeError as error:
            if not self.is_remote:
                raise
            raise EngineError(
                f"what listens at --dist-init-addr {self._config.dist_init_addr} does not answer as node 0 of an "
                "engine does: another program has the port, or node 0 has ended"
            ) from error

    def _open_lifeline(self, store: Store) -> None:
        peers = self._peers
        assert peers is not None
        if self._number == 0:
            self._lifeline = Lifelines(peers.store_host, peers.last_word)
            store.set(_LIFELINE, str(self._lifeline.port))
            store.set(_OUTPUTS, peers.remote_outbound)
            store.set(_INBOUND, msgspec.json.encode(peers.remote_inbound))
        elif self.is_remote:
            self._lifeline = Lifeline(peers.store_host, int(self._get(_LIFELINE)), self._number, peers.last_word)

    def _compare_hosts(self, store: Store, device: torch.device) -> None:
        """EngineError that names the first setting, file of the program or of the model that is another on node 0."""
        own: dict[str, Any] = msgspec.to_builtins(self._config) | {"device": device.type}
        path = self._config.model_path
        revision = Revision.of(path, self._config.load_format)
        if self._number == 0:
            store.set(_CONFIG, msgspec.json.encode((own, revision)))
        else:
            store.wait([_CONFIG], timedelta(seconds=self._config.dist_timeout))
            node = f"node {self._config.node_rank}"
            try:
                theirs, known = msgspec.json.decode(store.get(_CONFIG), type=tuple[dict[str, Any], Revision])
            except msgspec.ValidationError as error:
                raise EngineError(
                    f"this program is another on node 0 than on {node}: install the same version"
                ) from error
            # Other versions may have other settings, and mean other things by them.
            program = known.differing_program(revision, "node 0", node)
            if program is not None:
                raise EngineError(program)
            for field, value in theirs.items():
                if field not in _OF_THE_HOST and own.get(field) != value:
                    flag = "--" + field.replace("_", "-")
                    raise EngineError(f"{flag} is {value} on node 0 and {own.get(field)} on {node}")
            difference = known.differing_model(revision)
            if difference is not None:
                raise EngineError(
                    f"--model-path {theirs['model_path']} on node 0 and {path} on {node} are different models: "
                    f"{difference}"
                )
        # Only now: sizes that differ number the ranks in another way.
        if store.add(f"{_PRESENT}/{self._number}", 1) > 1:
            raise EngineError(f"--node-rank {self._config.node_rank} is taken by another host: each has its own")
        self._wait_for_all(store)

    def _wait_for_node_0(self, peers: Peers) -> None:
        """Until something listens there; the store's own message for what does not come is its stack."""
        deadline = time.monotonic() + self._config.dist_timeout
        while True:
            try:
                socket.create_connection((peers.store_host, peers.store_port), timeout=_CONNECT_TIMEOUT).close()
                return
            except OSError as error:
                if time.monotonic() > deadline:
                    raise EngineError(
                        f"node 0 has not come to --dist-init-addr {self._config.dist_init_addr} within --dist-timeout "
                        f"{self._config.dist_timeout:g} s ({error.strerror or error})"
                    ) from error
            time.sleep(_RETRY_INTERVAL)

    def _wait_for_all(self, store: Store) -> None:
        config, size = self._config, self._config.ranks_per_node
        keys = [f"{_PRESENT}/{number}" for number in range(size * config.nnodes)]
        try:
            store.wait(keys, timedelta(seconds=config.dist_timeout))
        except RuntimeError as error:
            missing = sorted({number // size for number, key in enumerate(keys) if not store.check([key])})
            if not missing:
                raise
            named = ", ".join(map(str, missing))
            raise EngineError(
                f"node {named} of {config.nnodes} has not come to --dist-init-addr {config.dist_init_addr} within "
                f"--dist-timeout {config.dist_timeout:g} s"
            ) from error
