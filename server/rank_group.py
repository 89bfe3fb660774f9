"""The rank processes of one server: started together, and ended together."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator

import msgspec

from scheduler.config import EngineConfig, HandOverAddress, Peers, RankSettings
from server.config import ParentLink
from server.engine_client import EngineClient
from server.nodes import MeetingPoint
from server.rank_process import RankProcess

# Seconds for ranks to end after they were told to.
END_GRACE = 5.0
# When ranks end one after the other, the end that caused the others may be noticed so many seconds later.
CAUSE_GRACE = 1.0
_LOOPBACK = "127.0.0.1"


class RankGroup:
    """One process for each rank on this host. Iterates over them in rank order.

    client: already made; rank 0 exchanges messages with it. address: on prefill and decode servers. link: of a server
    that is one of a group. meeting: of an engine on several hosts.
    """

    def __init__(
        self,
        config: EngineConfig,
        client: EngineClient,
        address: HandOverAddress | None = None,
        link: ParentLink | None = None,
        meeting: MeetingPoint | None = None,
    ) -> None:
        if config.num_threads is None:
            threads = max(1, len(os.sched_getaffinity(0)) // config.ranks_per_node)
            config = msgspec.structs.replace(config, num_threads=threads)
        self._config, self._client = config, client
        self._address, self._link = address, link
        self._ranks: list[RankProcess] = []
        if meeting is not None:
            self._start_node(meeting)
            return
        for replica in range(config.num_replicas):
            self._start(replica)

    def _start(self, replica: int) -> None:
        """The ranks of one engine on this host."""
        size = self._config.tp_size
        if size == 1:
            self._start_rank(replica, 0, None)
            return
        # Rank 0 inherits the listening socket of the store at which ranks meet: its port is taken from here on, and
        # the other ranks can connect before rank 0 answers.
        with socket.create_server((_LOOPBACK, 0), backlog=size) as listener:
            peers = Peers(_LOOPBACK, listener.getsockname()[1], self._steps(replica), self._inbound(replica))
            for rank in range(size):
                own = msgspec.structs.replace(peers, store_fd=listener.fileno() if rank == 0 else -1)
                self._start_rank(replica, rank, own)

    def _start_node(self, meeting: MeetingPoint) -> None:
        """The ranks of this host, of engines on several."""
        config = self._config
        peers = Peers(meeting.host, meeting.port, "", [], own_host=meeting.own_host)
        if config.node_rank == 0:
            outbound, inbound = self._client.listen_remote(meeting.host)
            peers = msgspec.structs.replace(peers, remote_outbound=outbound, remote_inbound=inbound)
        first = config.node_rank * config.ranks_per_node
        for number in range(first, first + config.ranks_per_node):
            replica, rank = divmod(number, config.tp_size)
            own = msgspec.structs.replace(
                peers,
                steps=self._steps(replica),
                inbound=self._inbound(replica),
                store_fd=meeting.listener.fileno() if number == 0 and meeting.listener is not None else -1,
            )
            self._start_rank(replica, rank, own, meeting.interface)
        if meeting.listener is not None:
            meeting.listener.close()

    def _start_rank(self, replica: int, rank: int, peers: Peers | None, interface: str = "lo") -> None:
        settings = RankSettings(
            self._config,
            rank,
            inbound=next(iter(self._inbound(replica)), ""),
            outbound=self._client.outbound_address,
            replica=replica,
            parent_pid=os.getpid(),
            address=self._address,
            peers=peers,
        )
        if self._link is not None:
            settings = msgspec.structs.replace(settings, name=self._link.name, refusals=self._link.refusals)
        self._ranks.append(RankProcess(settings, interface))

    def _steps(self, replica: int) -> str:
        return f"{self._client.steps_address}{replica}-"

    def _inbound(self, replica: int) -> list[str]:
        """Of the groups of a replica; none on other hosts than node 0, which tells its addresses by the store."""
        if self._config.node_rank > 0:
            return []
        count = self._config.dp_size // self._config.num_replicas
        return self._client.inbound_addresses[replica * count : (replica + 1) * count]

    def __iter__(self) -> Iterator[RankProcess]:
        return iter(self._ranks)

    def ask_where(self) -> None:
        """See RankProcess."""
        for rank in self._ranks:
            rank.ask_where()

    def kill(self) -> None:
        for rank in self._ranks:
            rank.kill()

    def end(self, grace: float) -> None:
        """Waits `grace` seconds for all to end by themselves, then ends those left. A second call does nothing."""
        deadline = time.monotonic() + grace
        for rank in self._ranks:
            rank.end(max(0.0, deadline - time.monotonic()))
