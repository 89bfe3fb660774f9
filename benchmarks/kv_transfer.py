"""GB/s of the KV managers in page-sized pieces, beside a memory copy and plain sockets in the same run.

    python -m benchmarks.kv_transfer [--backends tcp] [--sizes-mb 1 16 256] [--page-bytes 98304] [--scattered]

Sender and receiver are two processes, the same two for all rows. Each figure is the median over the repetitions of
bytes / time, where the time runs from the first send to the receiver's Success (for a plain socket: to its one-byte
answer). Progress goes to standard error.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import multiprocessing
import socket
import statistics
import sys
import time
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection

import numpy as np

from benchmarks._transfer import OPTIONS, hear, make_manager, receive_all, send_all
from disagg.base import KVManager, Role, TransferOptions
from disagg.bootstrap import BootstrapServer
from disagg.registry import KV_MANAGERS

REGIONS = 8


@dataclass(frozen=True)
class Row:
    """One line of the table. backend "" is a plain socket of `family`."""

    name: str
    backend: str = ""
    family: int = 0
    options: TransferOptions = OPTIONS


def manager_of(row: Row, role: Role, kv: np.ndarray, bootstrap_addr: str | None = None) -> KVManager:
    """`kv` is [regions, pages, page bytes / regions] uint8."""
    addresses = [region.ctypes.data for region in kv]
    return make_manager(row.backend, role, row.options, addresses, kv.shape, bootstrap_addr=bootstrap_addr)


def page_order(pages: int, scattered: bool) -> np.ndarray:
    return np.random.default_rng(3).permutation(pages) if scattered else np.arange(pages)


class Sender:
    """The other process: makes what a row needs, then sends whenever it is told to."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def run(self) -> None:
        while (order := self._pipe.recv()) is not None:
            row, shape, repeats, scattered, address = order
            if row.backend:
                self._manager(row, shape, repeats, scattered)
            else:
                self._socket(row, shape, repeats, address)

    def _manager(self, row: Row, shape: tuple[int, int, int], repeats: int, scattered: bool) -> None:
        kv = np.ones(shape, dtype=np.uint8)
        server = BootstrapServer("127.0.0.1", 0)
        manager = manager_of(row, "prefill", kv, server.address)
        self._pipe.send(server.address)
        send_all(self._pipe, manager, page_order(shape[1], scattered), repeats)
        self._pipe.recv()
        manager.close()
        server.close()

    def _socket(self, row: Row, shape: tuple[int, int, int], repeats: int, address: object) -> None:
        data = np.ones(shape, dtype=np.uint8)
        with socket.socket(row.family, socket.SOCK_STREAM) as sock:
            sock.connect(address)  # type: ignore[arg-type]
            for _ in range(repeats):
                self._pipe.recv()
                self._pipe.send(time.monotonic())
                sock.sendall(data.data.cast("B"))
                sock.recv(1)


def send_process(pipe: Connection) -> None:
    faulthandler.enable()
    Sender(pipe).run()


def measure_manager(
    pipe: Connection, row: Row, shape: tuple[int, int, int], repeats: int, scattered: bool
) -> list[float]:
    """Seconds of each repetition."""
    pipe.send((row, shape, repeats, scattered, None))
    kv = np.full(shape, 2, dtype=np.uint8)
    manager = manager_of(row, "decode", kv)
    try:
        address = str(hear(pipe))
        order = page_order(shape[1], scattered)[:: -1 if scattered else 1].copy()
        seconds = receive_all(pipe, manager, address, order, repeats)
        assert (kv == 1).all()
        pipe.send(None)
    finally:
        manager.close()
    return seconds


def measure_socket(pipe: Connection, row: Row, shape: tuple[int, int, int], repeats: int) -> list[float]:
    with socket.socket(row.family, socket.SOCK_STREAM) as listener:
        listener.bind("" if row.family == socket.AF_UNIX else ("127.0.0.1", 0))
        listener.listen()
        pipe.send((row, shape, repeats, False, listener.getsockname()))
        listener.settimeout(60)
        sock, _ = listener.accept()
        target = np.full(shape, 2, dtype=np.uint8)
        seconds = []
        for _ in range(repeats):
            pipe.send(None)
            started = hear(pipe)
            left = target.data.cast("B")
            while len(left):
                left = left[sock.recv_into(left) :]
            seconds.append(time.monotonic() - float(started))  # type: ignore[arg-type]
            sock.sendall(b"x")
        sock.close()
    return seconds


def measure_copy(shape: tuple[int, int, int], repeats: int) -> list[float]:
    source, target = np.ones(shape, dtype=np.uint8), np.full(shape, 2, dtype=np.uint8)
    seconds = []
    for _ in range(repeats):
        started = time.monotonic()
        np.copyto(target, source)
        seconds.append(time.monotonic() - started)
    return seconds


def rows(backends: list[str], options: TransferOptions) -> list[Row]:
    table = [Row("memory copy"), Row("unix socket", family=socket.AF_UNIX), Row("TCP socket", family=socket.AF_INET)]
    for backend in backends:
        if backend == "tcp":
            over_tcp = replace(options, same_host_path=False)
            table += [
                Row("tcp, same host", "tcp", options=options),
                Row("tcp, over TCP", "tcp", options=over_tcp),
                Row("tcp, over TCP, checksum", "tcp", options=replace(over_tcp, checksum=True)),
            ]
        else:
            table.append(Row(backend, backend, options=options))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description="GB/s of the KV managers beside a memory copy and plain sockets.")
    parser.add_argument(
        "--backends", nargs="+", default=["tcp"], choices=[name for name in KV_MANAGERS if name != "fake"]
    )
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
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.Process(target=send_process, args=(theirs,), daemon=True)
    process.start()
    theirs.close()  # so that a dead child ends the wait for it
    for megabytes in args.sizes_mb:
        pages = max(1, (megabytes << 20) // args.page_bytes)
        shape = (REGIONS, pages, args.page_bytes // REGIONS)
        size = shape[0] * shape[1] * shape[2]
        for row in rows(args.backends, options):
            if row.backend:
                seconds = measure_manager(ours, row, shape, args.repeats, args.scattered)
            elif row.family:
                seconds = measure_socket(ours, row, shape, args.repeats)
            else:
                seconds = measure_copy(shape, args.repeats)
            figure = round(size / statistics.median(seconds) / 1e9, 2)
            print(f"{megabytes} MB, {row.name}: {figure}", file=sys.stderr, flush=True)
            result.setdefault(row.name, {})[f"{megabytes} MB"] = figure
    ours.send(None)
    process.join(30)
    if args.json:
        print(json.dumps(result))
        return
    print(f"{'GB/s, median of ' + str(args.repeats):28}" + "".join(f"{mb:>9} MB" for mb in args.sizes_mb))
    for name, row_result in result.items():
        print(f"{name:28}" + "".join(f"{value:12.2f}" for value in row_result.values()))


if __name__ == "__main__":
    multiprocessing.set_start_method("spawn")
    main()
