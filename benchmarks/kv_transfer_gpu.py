"""GB/s from the memory of one CUDA device to that of another, one process each, beside plain copies of the same bytes.

    python -m benchmarks.kv_transfer_gpu [--source cuda:0] [--target cuda:1] [--backends tcp nixl] [--sizes-mb 16 256]

"device copy": this process copies a whole buffer between the two devices. "listed items": the kernel that the tcp
backend uses, on the same pages, in this process. "through the host": the tcp backend kept from sharing device memory.
With one device, source and target may be the same. Times run from the send to the receiver's Success, median of the
repetitions; the first transfer of a row, which compiles and connects, is not counted.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection

import numpy as np
import torch

from benchmarks._transfer import OPTIONS, hear, make_manager, receive_all, send_all
from disagg.base import KVManager, Role, TransferOptions
from disagg.bootstrap import BootstrapServer
from disagg.cuda_ipc import enable_peer_access
from layers.kernels.triton_copy_items import ItemSide, copy_items


def manager_of(
    backend: str, role: Role, options: TransferOptions, kv: torch.Tensor, bootstrap_addr: str | None = None
) -> KVManager:
    """`kv` is [regions, pages, page bytes] uint8."""
    addresses = [region.data_ptr() for region in kv]
    regions, pages, page_bytes = kv.shape
    return make_manager(backend, role, options, addresses, (regions, pages, page_bytes), str(kv.device), bootstrap_addr)


def page_order(pages: int) -> np.ndarray:
    return np.random.default_rng(3).permutation(pages)


def send_process(
    pipe: Connection, backend: str, options: TransferOptions, device: str, shape: tuple[int, int, int], repeats: int
) -> None:
    faulthandler.enable()
    kv = torch.full(shape, 1, dtype=torch.uint8, device=device)
    server = BootstrapServer("127.0.0.1", 0)
    manager = manager_of(backend, "prefill", options, kv, server.address)
    pipe.send(server.address)
    send_all(pipe, manager, page_order(shape[1]), repeats + 1)
    pipe.recv()
    manager.close()
    server.close()


def measure_manager(
    backend: str, options: TransferOptions, source: str, target: str, shape: tuple[int, int, int], repeats: int
) -> list[float]:
    ours, theirs = multiprocessing.Pipe()
    arguments = (theirs, backend, options, source, shape, repeats)
    process = multiprocessing.Process(target=send_process, args=arguments, daemon=True)
    process.start()
    theirs.close()  # so that a dead child ends the wait for it
    kv = torch.full(shape, 2, dtype=torch.uint8, device=target)
    manager = manager_of(backend, "decode", options, kv)
    try:
        address = str(hear(ours, 120))
        order = page_order(shape[1])[::-1].copy()
        seconds = receive_all(ours, manager, address, order, repeats + 1)
        if not bool((kv == 1).all()):
            raise RuntimeError(f"{backend}: the pages are not those that were sent")
        ours.send(None)
        process.join(30)
    finally:
        manager.close()
        process.kill()
    return seconds[1:]


def timed(action: Callable[[], object], devices: set[str], repeats: int) -> list[float]:
    seconds = []
    for _ in range(repeats + 1):
        for device in devices:
            torch.cuda.synchronize(device)
        started = time.monotonic()
        action()
        for device in devices:
            torch.cuda.synchronize(device)
        seconds.append(time.monotonic() - started)
    return seconds[1:]


def measure_copies(source: str, target: str, shape: tuple[int, int, int], repeats: int) -> dict[str, list[float]]:
    here = torch.full(shape, 1, dtype=torch.uint8, device=source)
    there = torch.full(shape, 2, dtype=torch.uint8, device=target)
    devices = {source, target}
    plain = timed(lambda: there.copy_(here), devices, repeats)

    def side(kv: torch.Tensor, items: np.ndarray) -> ItemSide:
        ptrs = np.array([region.data_ptr() for region in kv])
        return ItemSide(ptrs, np.full(len(kv), kv.shape[2]), items)

    enable_peer_access(torch.device(target), torch.device(source))
    order = page_order(shape[1])
    lengths = np.full(shape[0], shape[2])

    def listed() -> None:
        with torch.cuda.device(target):
            copy_items(side(here, order), side(there, order[::-1].copy()), 1, lengths, torch.device(target))

    return {"device copy": plain, "listed items": timed(listed, devices, repeats)}


def main() -> None:
    parser = argparse.ArgumentParser(description="GB/s of the KV managers between CUDA devices.")
    last = f"cuda:{max(0, torch.cuda.device_count() - 1)}"
    parser.add_argument("--source", default="cuda:0")
    parser.add_argument("--target", default=last)
    parser.add_argument("--backends", nargs="+", default=["tcp"])
    parser.add_argument("--sizes-mb", type=int, nargs="+", default=[16, 256, 2048])
    parser.add_argument("--page-bytes", type=int, default=32 * 1024, help="bytes of one page in one region")
    parser.add_argument("--regions", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--through-host", action="store_true", help="also the tcp backend by way of host memory")
    args = parser.parse_args()
    result: dict[str, dict[str, float]] = {}
    for megabytes in args.sizes_mb:
        pages = max(1, (megabytes << 20) // (args.page_bytes * args.regions))
        shape = (args.regions, pages, args.page_bytes)
        size = shape[0] * shape[1] * shape[2]
        figures = measure_copies(args.source, args.target, shape, args.repeats)
        runs = [(backend, backend, OPTIONS) for backend in args.backends]
        if args.through_host:
            runs.append(("tcp through the host", "tcp", replace(OPTIONS, same_host_path=False)))
        for name, backend, options in runs:
            figures[name] = measure_manager(backend, options, args.source, args.target, shape, args.repeats)
        for name, seconds in figures.items():
            rate = round(size / statistics.median(seconds) / 1e9, 2)
            print(f"{megabytes} MB, {name}: {rate} GB/s", file=sys.stderr, flush=True)
            result.setdefault(name, {})[f"{megabytes} MB"] = rate
    print(json.dumps({"source": args.source, "target": args.target, "GB/s": result}))


if __name__ == "__main__":
    multiprocessing.set_start_method("spawn")
    main()
