"""A prefill server in a process of its own: python -m tests.disagg.prefill_process PORT PAGES PAGE_BYTES [BACKEND].

Prints its bootstrap port, then sends every room that a line on standard input names: ROOM NUM_PAGES CHUNK_PAGES.
"""

from __future__ import annotations

import sys

import numpy as np

from disagg.base import KVPoll
from disagg.bootstrap import BootstrapServer
from disagg.registry import KV_MANAGERS
from tests.disagg.support import OPTIONS, Memory, wait_for


def main() -> None:
    port, pages, page_bytes = map(int, sys.argv[1:4])
    backend = sys.argv[4] if len(sys.argv) > 4 else "tcp"
    memory = Memory(pages=pages, page_bytes=page_bytes, fill=1)
    server = BootstrapServer("127.0.0.1", port)
    manager = KV_MANAGERS[backend](memory.args(), "prefill", OPTIONS, server.address)
    print(server.port, flush=True)
    for line in sys.stdin:
        room, num_pages, chunk = map(int, line.split())
        sender = manager.create_sender(room)
        wait_for(sender, KVPoll.WaitingForInput)
        sender.init(num_pages, room % 8)
        for start in range(0, num_pages, chunk):
            sender.send(np.arange(start, min(start + chunk, num_pages)), last=start + chunk >= num_pages)
        wait_for(sender, KVPoll.Success)
        sender.clear()
        print("sent", room, flush=True)
    manager.close()
    server.close()


if __name__ == "__main__":
    main()
