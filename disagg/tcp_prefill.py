"""Prefill mover of the tcp backend: sends frames over several connections to one decode rank."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from disagg.base import KVArgs, TransferOptions
from disagg.control import close_socket
from disagg.mover import Job, PeerMemory
from disagg.tcp_memory import FrameMemory, frame_memory, frame_part
from disagg.tcp_transport import Endpoint, FrameHeader, FrameWriter, connect_bulk, host_identity

_CONNECT_TIMEOUT = 5.0
_DEVICE_FRAME_BYTES = 256 << 20


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
        self._offer = b""
        if kv_args.device != "cpu" and options.same_host_path and not options.checksum:
            from disagg.tcp_device import make_offer

            self._offer = make_offer(kv_args)

    def open(self, peer: PeerMemory, on_lost: Callable[[str], None]) -> _Session:
        return _Session(self._args, self._options, peer, on_lost, self._offer)

    def close(self) -> None:
        """Sessions own all there is."""


class _Session:
    """All connections take frames from one queue, so the faster ones take more."""

    def __init__(
        self,
        kv_args: KVArgs,
        options: TransferOptions,
        peer: PeerMemory,
        on_lost: Callable[[str], None],
        offer: bytes,
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
                writers.append(FrameWriter(sock, endpoint.token, _CONNECT_TIMEOUT, offer if same_host else b""))
        except OSError as error:
            for sock in self._sockets:
                close_socket(sock)
            raise OSError(f"no bulk connection to {endpoint.host}:{endpoint.port}: {error}") from error
        # A device copies a frame in the time that it takes to describe it, so there frames are large.
        self._frame_bytes = _DEVICE_FRAME_BYTES if all(w.from_device for w in writers) else options.frame_bytes
        self._threads = [
            threading.Thread(
                target=self._send_frames, args=(writer, frame_memory(kv_args.device)), name="kv-send", daemon=True
            )
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
        limit = min(self._frame_bytes, share)
        step = max(1, limit // max(item_bytes))
        for start in range(0, num_items, step):
            count = min(step, num_items - start)
            first, size = 0, 0
            for region, length in enumerate(item_bytes):
                size += length * count
                if region + 1 == len(item_bytes) or size + item_bytes[region + 1] * count > limit:
                    yield first, region + 1 - first, start, count
                    first, size = region + 1, 0

    def _send_frames(self, writer: FrameWriter, memory: FrameMemory) -> None:
        while (frame := self._frames.get()) is not None:
            problem = None
            if self._closed:
                problem = f"the connection to {self._name} was closed"
            elif not frame.work.job.cancelled:
                try:
                    self._send_frame(writer, frame, memory)
                except Exception as error:  # whatever it is, a frame that nobody ends would leave its room waiting
                    problem = f"bulk connection to {self._name} failed: {error}"
                    self._closed = True
                    self._on_lost(problem)
            frame.work.frame_ended(problem)

    def _send_frame(self, writer: FrameWriter, frame: _Frame, memory: FrameMemory) -> None:
        job = frame.work.job
        items = job.source_items[frame.item_start : frame.item_start + frame.num_items]
        header = FrameHeader(
            transfer_id=job.transfer_id,
            num_bytes=0,
            component=job.component,
            region_start=frame.region_start,
            num_regions=frame.num_regions,
            item_start=job.item_start + frame.item_start,
            num_items=frame.num_items,
        )
        part = frame_part(self._args, header, items, job.slices)
        header = header._replace(num_bytes=part.num_bytes)
        if writer.from_device:
            writer.send_items(header, items)
            return
        pieces = memory.outgoing(part)
        if self._options.checksum:
            header = header._replace(has_checksum=1, checksum=pieces.checksum())
        writer.send(header, pieces)
