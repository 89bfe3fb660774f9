"""The rank processes of one server: started together, and ended together."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator

import msgspec

from scheduler.config import EngineConfig
from server.engine_client import EngineClient
from server.nodes import MeetingPoint
from server.rank_process import HandOverAddress, PeerAddresses, RankProcess

_LOOPBACK = "127.0.0.1"


class RankGroup:
    """One process for each rank on this host. Iterates over them in rank order.

    client: already made; rank 0 exchanges messages with it. address: on prefill and decode servers. name: of the
    server in log lines, where there are several. meeting: of an engine on several hosts.
    """

    def __init__(
        self,
        config: EngineConfig,
        client: EngineClient,
        address: HandOverAddress | None = None,
        name: str = "",
        meeting: MeetingPoint | None = None,
    ) -> None:
        if config.num_threads is None:
            local_ranks = config.layout().tp_size * config.num_replicas // config.nnodes
            threads = max(1, len(os.sched_getaffinity(0)) // local_ranks)
            config = msgspec.structs.replace(config, num_threads=threads)
        self._config, self._client = config, client
        self._address, self._name = address, name
        self._ranks: list[RankProcess] = []
        if meeting is not None:
            self._start_node(meeting)
            return
        for replica in range(config.num_replicas):
            self._start(replica)

    def _start(self, replica: int) -> None:
        """Start one engine."""
        client, layout = self._client, self._config.layout()
        inbound = client.inbound_addresses[replica * layout.dp_size : (replica + 1) * layout.dp_size]

        def start(rank: int, peers: PeerAddresses | None) -> RankProcess:
            return RankProcess(
                self._config,
                rank,
                layout.tp_size,
                inbound[0],
                client.outbound_address,
                self._address,
                peers,
                self._name,
                replica,
            )

        if layout.tp_size == 1:
            self._ranks.append(start(0, None))
            return
        # Rank 0 inherits the listening socket of the store at which ranks meet: its port is taken from here on, and
        # the other ranks can connect before rank 0 answers.
        with socket.create_server((_LOOPBACK, 0), backlog=layout.tp_size) as listener:
            steps = f"{client.steps_address}{replica}-"
            peers = PeerAddresses(_LOOPBACK, listener.getsockname()[1], steps, inbound)
            for rank in range(layout.tp_size):
                own = msgspec.structs.replace(peers, store_fd=listener.fileno() if rank == 0 else -1)
                self._ranks.append(start(rank, own))

    def _start_node(self, meeting: MeetingPoint) -> None:
        """Start the ranks of this host, of an engine on several."""
        client, config = self._client, self._config
        size = config.layout().tp_size
        local_size = size // config.nnodes
        peers = PeerAddresses(meeting.host, meeting.port, client.steps_address, client.inbound_addresses)
        if config.node_rank == 0:
            peers = msgspec.structs.replace(peers, remote_outbound=client.listen_remote(meeting.host))
        for rank in range(config.node_rank * local_size, (config.node_rank + 1) * local_size):
            store_fd = meeting.listener.fileno() if rank == 0 and meeting.listener is not None else -1
            own = msgspec.structs.replace(peers, store_fd=store_fd)
            inbound, outbound = client.inbound_addresses[0], client.outbound_address
            self._ranks.append(
                RankProcess(config, rank, size, inbound, outbound, None, own, self._name, interface=meeting.interface)
            )
        if meeting.listener is not None:
            meeting.listener.close()

    def __iter__(self) -> Iterator[RankProcess]:
        return iter(self._ranks)

    def kill(self) -> None:
        for rank in self._ranks:
            rank.kill()

    def end(self, grace: float) -> None:
        """Waits `grace` seconds for all to end by themselves, then ends those left. A second call does nothing."""
        deadline = time.monotonic() + grace
        for rank in self._ranks:
            rank.end(max(0.0, deadline - time.monotonic()))
