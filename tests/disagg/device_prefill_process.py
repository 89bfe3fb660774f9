"""A prefill rank with pages on a device: python -m tests.disagg.device_prefill_process DEVICE SAME_HOST.

Prints its bootstrap address, then sends all its pages to every room that a line on standard input names.
"""

from __future__ import annotations

import sys
from dataclasses import replace

import numpy as np

from disagg.base import KVPoll
from disagg.bootstrap import BootstrapServer
from disagg.tcp import TcpKVManager
from tests.disagg.device_memory import DevicePages
from tests.disagg.support import OPTIONS, wait_until


def main() -> None:
    pages = DevicePages(sys.argv[1], fill=True)
    server = BootstrapServer("127.0.0.1", 0)
    options = replace(OPTIONS, same_host_path=sys.argv[2] == "1")
    manager = TcpKVManager(pages.args(), "prefill", options, server.address)
    print(server.address, flush=True)
    for line in sys.stdin:
        sender = manager.create_sender(int(line))
        wait_until(lambda: sender.poll() in (KVPoll.WaitingForInput, KVPoll.Failed))  # noqa: B023
        if sender.poll() is KVPoll.WaitingForInput:
            sender.init(pages.num_pages, 0)
            sender.send(np.arange(pages.num_pages), last=True)
        wait_until(lambda: sender.poll() in (KVPoll.Success, KVPoll.Failed))  # noqa: B023
        sender.clear()
    manager.close()
    server.close()


if __name__ == "__main__":
    main()
