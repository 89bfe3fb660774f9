"""What a rank finds where it is to meet the others."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from scheduler.config import EngineConfig, Peers
from scheduler.engine import EngineError
from scheduler.rendezvous import Rendezvous


@pytest.fixture
def other_program() -> Iterator[int]:
    """Port of one that ends every connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                try:
                    listener.accept()[0].close()
                except OSError:
                    return

        thread = threading.Thread(target=serve)
        thread.start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
    thread.join(60)


@pytest.mark.timeout(120)
def test_another_program_at_the_meeting_point_is_one_line(other_program: int) -> None:
    address = f"127.0.0.1:{other_program}"
    config = EngineConfig(
        model_path="tiny-llama", tp_size=2, nnodes=2, node_rank=1, dist_init_addr=address, dist_timeout=1.0
    )
    peers = Peers("127.0.0.1", other_program, "", [], own_host="127.0.0.1")
    with pytest.raises(EngineError, match=f"what listens at --dist-init-addr {address} does not answer as node 0"):
        Rendezvous(config, 1, 0, peers).join()
