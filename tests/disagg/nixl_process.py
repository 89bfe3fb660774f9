"""One end of a nixl pair in a process of its own: python -m tests.disagg.nixl_process ROLE BOOTSTRAP_PORT PATH.

ROLE prefill: serves the table of prefill ranks at BOOTSTRAP_PORT (0: any free one), prints the port, then sends all its
pages to every room that a line on standard input names, and prints the room when it has done so.
ROLE decode: for every such line asks the prefill rank behind BOOTSTRAP_PORT for all pages; prints the room once the
transfer runs and again once it has ended.
PATH: "same-host" or "tcp". A line "exit CODE" leaves without closing anything.
"""

from __future__ import annotations

import sys
from dataclasses import replace

import numpy as np

from disagg.base import KVPoll
from disagg.bootstrap import BootstrapServer
from disagg.nixl import NixlKVManager
from tests.disagg.support import OPTIONS, Memory, wait_for, wait_until

PAGES, PAGE_BYTES = 256, 32768
ROW = 3


def main() -> None:
    role, port, path = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    options = replace(OPTIONS, same_host_path=path == "same-host", frame_bytes=1 << 20)
    memory = Memory(pages=PAGES, page_bytes=PAGE_BYTES, fill=1 if role == "prefill" else None)
    pages = np.arange(PAGES)
    if role == "prefill":
        server = BootstrapServer("127.0.0.1", port)
        manager = NixlKVManager(memory.args(), "prefill", options, server.address)
        print(server.port, flush=True)
    else:
        manager = NixlKVManager(memory.args(), "decode", options)
        print("ready", flush=True)
    for line in sys.stdin:
        if line.startswith("exit"):
            sys.exit(int(line.split()[1]))
        room = int(line)
        if role == "prefill":
            sender = manager.create_sender(room)
            wait_for(sender, KVPoll.WaitingForInput)
            sender.init(PAGES, ROW)
            sender.send(pages, last=True)
            print("sending", room, flush=True)
            wait_for(sender, KVPoll.Success)
            sender.clear()
        else:
            receiver = manager.create_receiver(room, f"127.0.0.1:{port}")
            receiver.init()
            wait_for(receiver, KVPoll.WaitingForInput)
            receiver.send_metadata(pages, ROW)
            wait_until(lambda: receiver.poll() is not KVPoll.WaitingForInput)  # noqa: B023
            print("receiving", room, flush=True)
            wait_for(receiver, KVPoll.Success)
            receiver.clear()
        print("done", room, flush=True)


if __name__ == "__main__":
    main()
