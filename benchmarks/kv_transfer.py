"""GB/s of the KV managers in page-sized pieces, beside a memory copy and plain sockets in the same run.

    python -m benchmarks.kv_transfer [--sizes-mb 1 16 256] [--page-bytes 98304] [--scattered]

Sender and receiver are two processes. Each figure is the median over the repetitions of bytes / time, where the time
runs from the first send to the receiver's Success (for a plain socket: to its one-byte answer).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import socket
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection

import numpy as np

from disagg.base import KVArgs, KVPoll, KVReceiver, KVSender, TransferOptions
from disagg.bootstrap import BootstrapServer
from disagg.registry import KV_MANAGERS

REGIONS = 8
OPTIONS = TransferOptions(bootstrap_timeout=30)


def memory_args(kv: np.ndarray, aux: np.ndarray) -> KVArgs:
    """`kv` is [regions, pages, page bytes / regions] uint8."""
    return KVArgs(
        model="benchmark",
        page_size=16,
        kv_dtype="uint8",
        kv_layout="region-page",
        kv_head_num=1,
        total_kv_head_num=1,
        kv_data_ptrs=[region.ctypes.data for region in kv],
        kv_data_lens=[region.nbytes for region in kv],
        kv_item_lens=[kv.shape[2]] * len(kv),
        kv_layer_ids=list(range(len(kv))),
        aux_data_ptrs=[aux.ctypes.data],
        aux_data_lens=[aux.nbytes],
        aux_item_lens=[aux.shape[1]],
    )


def wait_for(end: KVSender | KVReceiver, wanted: KVPoll) -> None:
    while (status := end.poll()) is not wanted:
        if status is KVPoll.Failed:
            raise end.failure()
        time.sleep(0.0002)


def page_order(pages: int, scattered: bool) -> np.ndarray:
    return np.random.default_rng(3).permutation(pages) if scattered else np.arange(pages)


def prefill(
    pipe: Connection, shape: tuple[int, int, int], repeats: int, scattered: bool, options: TransferOptions
) -> None:
    kv = np.ones(shape, dtype=np.uint8)
    server = BootstrapServer("127.0.0.1", 0)
    manager = KV_MANAGERS["tcp"](memory_args(kv, np.ones((1, 64), dtype=np.uint8)), "prefill", options, server.address)
    pipe.send(server.address)
    order = page_order(shape[1], scattered)
    for room in range(1, repeats + 1):
        sender = manager.create_sender(room)
        wait_for(sender, KVPoll.WaitingForInput)
        sender.init(shape[1], 0)
        pipe.send(time.monotonic())
        sender.send(order, last=True)
        wait_for(sender, KVPoll.Success)
        sender.clear()
    pipe.recv()
    manager.close()
    server.close()


def measure_manager(
    shape: tuple[int, int, int], repeats: int, scattered: bool, options: TransferOptions
) -> list[float]:
    """Seconds of each repetition."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.Process(target=prefill, args=(theirs, shape, repeats, scattered, options))
    process.start()
    theirs.close()  # so that a dead child ends the wait for it
    kv = np.zeros(shape, dtype=np.uint8)
    kv[:] = 2
    manager = KV_MANAGERS["tcp"](memory_args(kv, np.zeros((1, 64), dtype=np.uint8)), "decode", options)
    address = ours.recv()
    order = page_order(shape[1], scattered)[::-1].copy() if scattered else page_order(shape[1], False)
    seconds = []
    for room in range(1, repeats + 1):
        receiver = manager.create_receiver(room, address)
        receiver.init()
        wait_for(receiver, KVPoll.WaitingForInput)
        receiver.send_metadata(order, 0)
        started = ours.recv()
        wait_for(receiver, KVPoll.Success)
        seconds.append(time.monotonic() - started)
        receiver.clear()
    assert (kv == 1).all()
    ours.send(None)
    process.join()
    manager.close()
    return seconds


def plain_sender(pipe: Connection, family: int, address: object, size: int, repeats: int) -> None:
    data = np.ones(size, dtype=np.uint8)
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        sock.connect(address)  # type: ignore[arg-type]
        for _ in range(repeats):
            pipe.recv()
            pipe.send(time.monotonic())
            sock.sendall(memoryview(data))
            sock.recv(1)


def measure_socket(family: int, size: int, repeats: int) -> list[float]:
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.bind("" if family == socket.AF_UNIX else ("127.0.0.1", 0))
        listener.listen()
        ours, theirs = multiprocessing.Pipe()
        arguments = (theirs, family, listener.getsockname(), size, repeats)
        process = multiprocessing.Process(target=plain_sender, args=arguments)
        process.start()
        theirs.close()  # so that a dead child ends the wait for it
        sock, _ = listener.accept()
        target = np.zeros(size, dtype=np.uint8)
        target[:] = 2
        seconds = []
        for _ in range(repeats):
            ours.send(None)
            started = ours.recv()
            left = memoryview(target)
            while len(left):
                left = left[sock.recv_into(left) :]
            seconds.append(time.monotonic() - started)
            sock.sendall(b"x")
        sock.close()
        process.join()
    return seconds


def measure_copy(size: int, repeats: int) -> list[float]:
    source, target = np.ones(size, dtype=np.uint8), np.zeros(size, dtype=np.uint8)
    target[:] = 2
    seconds = []
    for _ in range(repeats):
        started = time.monotonic()
        np.copyto(target, source)
        seconds.append(time.monotonic() - started)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description="GB/s of the KV managers beside a memory copy and plain sockets.")
    parser.add_argument("--sizes-mb", type=int, nargs="+", default=[1, 16, 256])
    parser.add_argument("--page-bytes", type=int, default=96 * 1024, help="bytes of one page over all regions")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--scattered", action="store_true", help="no two pages adjacent on either side")
    parser.add_argument("--num-connections", type=int, default=OPTIONS.num_connections)
    parser.add_argument("--frame-bytes", type=int, default=OPTIONS.frame_bytes)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    args = parser.parse_args()
    options = replace(OPTIONS, num_connections=args.num_connections, frame_bytes=args.frame_bytes)
    result: dict[str, dict[str, float]] = {}
    for megabytes in args.sizes_mb:
        pages = max(1, (megabytes << 20) // args.page_bytes)
        shape = (REGIONS, pages, args.page_bytes // REGIONS)
        size = shape[0] * shape[1] * shape[2]
        tcp_only = replace(options, same_host_path=False)
        runs: dict[str, Callable[[], list[float]]] = {
            "memory copy": lambda size=size: measure_copy(size, args.repeats),
            "unix socket": lambda size=size: measure_socket(socket.AF_UNIX, size, args.repeats),
            "tcp manager, same host": lambda shape=shape: measure_manager(shape, args.repeats, args.scattered, options),
            "TCP socket": lambda size=size: measure_socket(socket.AF_INET, size, args.repeats),
            "tcp manager, TCP": lambda shape=shape, tcp_only=tcp_only: measure_manager(
                shape, args.repeats, args.scattered, tcp_only
            ),
            "tcp manager, TCP, checksum": lambda shape=shape, tcp_only=tcp_only: measure_manager(
                shape, args.repeats, args.scattered, replace(tcp_only, checksum=True)
            ),
        }
        for name, run in runs.items():
            result.setdefault(name, {})[f"{megabytes} MB"] = round(size / statistics.median(run()) / 1e9, 2)
    if args.json:
        print(json.dumps(result))
        return
    print(f"{'GB/s, median of ' + str(args.repeats):28}" + "".join(f"{mb:>9} MB" for mb in args.sizes_mb))
    for name, row in result.items():
        print(f"{name:28}" + "".join(f"{value:12.2f}" for value in row.values()))


if __name__ == "__main__":
    multiprocessing.set_start_method("spawn")
    main()
