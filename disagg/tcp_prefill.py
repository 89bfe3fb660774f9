"""Prefill mover of the tcp backend: sends frames over several connections to one decode rank."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from disagg.base import KVArgs, TransferOptions
from disagg.control import close_socket
from disagg.mover import KV_PAGES, Job, PeerMemory
from disagg.pages import sliced_address_list
from disagg.tcp_transport import Endpoint, FrameHeader, FrameWriter, ScatterList, connect_bulk, host_identity

_CONNECT_TIMEOUT = 5.0


class _Work:
    """A job and how many of its frames are left."""

    def __init__(self, job: Job, num_frames: int) -> None:
        self.job = job
        self._left = num_frames
        self._error: str | None = None
        self._lock = threading.Lock()

    def frame_ended(self, error: str | None) -> None:
        with self._lock:
            self._error = self._error or error
            self._left -= 1
            last = not self._left
        if last:
            self.job.finish(self._error)


@dataclass(frozen=True)
class _Frame:
    """Items item_start.. of the job's list, in some of its regions."""

    work: _Work
    region_start: int
    num_regions: int
    item_start: int
    num_items: int


class TcpPrefill:
    """See PrefillMover."""

    def __init__(self, kv_args: KVArgs, options: TransferOptions) -> None:
        self._args = kv_args
        self._options = options

    def open(self, peer: PeerMemory, on_lost: Callable[[str], None]) -> _Session:
        return _Session(self._args, self._options, peer, on_lost)

    def close(self) -> None:
        """Sessions own all there is."""


class _Session:
    """All connections take frames from one queue, so the faster ones take more."""

    def __init__(
        self, kv_args: KVArgs, options: TransferOptions, peer: PeerMemory, on_lost: Callable[[str], None]
    ) -> None:
        self._args = kv_args
        self._options = options
        self._name = peer.name
        self._on_lost = on_lost
        self._frames: queue.SimpleQueue[_Frame | None] = queue.SimpleQueue()
        self._closed = False
        endpoint = Endpoint.unpack(peer.endpoint)
        same_host = options.same_host_path and endpoint.unix_name and endpoint.host_identity == host_identity()
        self._sockets: list[socket.socket] = []
        writers: list[FrameWriter] = []
        try:
            for _ in range(options.num_connections):
                unix_name = endpoint.unix_name if same_host else ""
                sock = connect_bulk(endpoint.host, endpoint.port, unix_name, _CONNECT_TIMEOUT)
                self._sockets.append(sock)
                writers.append(FrameWriter(sock, endpoint.token, _CONNECT_TIMEOUT))
        except OSError as error:
            for sock in self._sockets:
                close_socket(sock)
            raise OSError(f"no bulk connection to {endpoint.host}:{endpoint.port}: {error}") from error
        self._threads = [
            threading.Thread(target=self._send_frames, args=(writer,), name="kv-send", daemon=True)
            for writer in writers
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, job: Job) -> None:
        cuts = list(self._cut(job))
        work = _Work(job, len(cuts))
        for cut in cuts:
            self._frames.put(_Frame(work, *cut))

    def close(self) -> None:
        """Frames that are left go through the threads unsent, so that their jobs end."""
        self._closed = True
        for sock in self._sockets:
            close_socket(sock)
        for _ in self._threads:
            self._frames.put(None)
        for thread in self._threads:
            thread.join()

    def _cut(self, job: Job) -> Iterator[tuple[int, int, int, int]]:
        """Cut regions x items into frames near frame_bytes, by regions first: long runs stay long."""
        item_bytes = job.slices.item_bytes_R.tolist()
        num_items = len(job.source_items)
        share = max(sum(item_bytes) * num_items // self._options.num_connections, 1 << 20)
        limit = min(self._options.frame_bytes, share)
        step = max(1, limit // max(item_bytes))
        for start in range(0, num_items, step):
            count = min(step, num_items - start)
            first, size = 0, 0
            for region, length in enumerate(item_bytes):
                size += length * count
                if region + 1 == len(item_bytes) or size + item_bytes[region + 1] * count > limit:
                    yield first, region + 1 - first, start, count
                    first, size = region + 1, 0

    def _send_frames(self, writer: FrameWriter) -> None:
        while (frame := self._frames.get()) is not None:
            problem = None
            if self._closed:
                problem = f"the connection to {self._name} was closed"
            elif not frame.work.job.cancelled:
                try:
                    self._send_frame(writer, frame)
                except OSError as error:
                    problem = f"bulk connection to {self._name} failed: {error}"
                    self._closed = True
                    self._on_lost(problem)
            frame.work.frame_ended(problem)

    def _send_frame(self, writer: FrameWriter, frame: _Frame) -> None:
        job = frame.work.job
        if job.component == KV_PAGES:
            ptrs, item_lens = self._args.kv_data_ptrs, self._args.kv_item_lens
        else:
            component = self._args.state[job.component]
            ptrs, item_lens = component.data_ptrs, component.item_lens
        regions = slice(frame.region_start, frame.region_start + frame.num_regions)
        slices = job.slices.regions(regions)
        items = job.source_items[frame.item_start : frame.item_start + frame.num_items]
        pieces = ScatterList(
            *sliced_address_list(
                ptrs[regions], item_lens[regions], items, slices.rows, slices.source_offsets_R, slices.lengths_R
            )
        )
        header = FrameHeader(
            transfer_id=job.transfer_id,
            num_bytes=pieces.num_bytes,
            component=job.component,
            region_start=frame.region_start,
            num_regions=frame.num_regions,
            item_start=job.item_start + frame.item_start,
            num_items=frame.num_items,
            has_checksum=int(self._options.checksum),
            checksum=pieces.checksum() if self._options.checksum else 0,
        )
        writer.send(header, pieces)
