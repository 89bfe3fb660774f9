"""A decode server in a process of its own: python -m tests.disagg.decode_process ADDR PAGES PAGE_BYTES.

For every room that a line on standard input names it asks the prefill server at ADDR for all pages. It prints
"told ROOM" once the prefill side has its indices, and "have ROOM" or "lost ROOM REASON" at the end.
"""

from __future__ import annotations

import sys

import numpy as np

from disagg.base import KVPoll, KVTransferError
from disagg.tcp import TcpKVManager
from tests.disagg.support import OPTIONS, Memory, wait_for


def main() -> None:
    address = sys.argv[1]
    pages, page_bytes = map(int, sys.argv[2:4])
    memory = Memory(pages=pages, page_bytes=page_bytes)
    manager = TcpKVManager(memory.args(), "decode", OPTIONS)
    print("ready", flush=True)
    for line in sys.stdin:
        room = int(line)
        receiver = manager.create_receiver(room, address)
        receiver.init()
        try:
            wait_for(receiver, KVPoll.WaitingForInput)
            receiver.send_metadata(np.arange(pages), room % 8)
            print("told", room, flush=True)
            wait_for(receiver, KVPoll.Success)
            print("have", room, flush=True)
        except KVTransferError as error:
            print("lost", room, error.reason, flush=True)
        receiver.clear()
    manager.close()


if __name__ == "__main__":
    main()
