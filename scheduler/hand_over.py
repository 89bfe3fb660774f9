"""One rank's means of handing requests over: its KV managers, its metadata rows and the counts it keeps."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from disagg.base import KVArgs, KVManager, KVPoll, KVReceiver, KVSender, Role, TransferOptions
from disagg.bootstrap_client import FAKE_BOOTSTRAP_HOST
from disagg.fake import FakeKVManager
from disagg.registry import kv_manager_class
from layers.kv_cache import KVCache
from layers.process_groups import RankGroups
from models import model_digest, weights_digest
from scheduler.config import EngineConfig, HandOverAddress, bracketed
from scheduler.messages import STATUS_UNFIT, Bootstrap
from scheduler.metadata_rows import MetadataRows


class HandOver:
    """Makes senders or receivers, and reads their states as the whole group of tensor-parallel ranks has them.

    min_reduce: element-wise minimum over the ranks of the group; the identity for one rank. Every rank calls it at the
        same point of every step with equally long lists.
    terms: what a server of the other role must have too, by name, for routers; the managers compare more than that.
    """

    def __init__(
        self,
        manager: KVManager,
        rows: MetadataRows,
        min_reduce: Callable[[list[int]], list[int]] = lambda values: values,
        terms: dict[str, str] | None = None,
    ) -> None:
        self.manager = manager
        self.terms = terms or {}
        self.rows = rows
        self._min_reduce = min_reduce
        # Warm-up and health probes take the fake path on a server of any backend.
        self._fake = manager if isinstance(manager, FakeKVManager) else FakeKVManager(manager.kv_args, "decode")
        self.completed_total = 0
        self.failed_total = 0
        self.tokens_total = 0
        self.seconds_total = 0.0

    def is_fake(self, bootstrap: Bootstrap) -> bool:
        return self._fake is self.manager or bootstrap.host == FAKE_BOOTSTRAP_HOST

    def create_sender(self, bootstrap: Bootstrap) -> KVSender:
        """ValueError when the room is no room or belongs to another request."""
        manager = self._fake if self.is_fake(bootstrap) else self.manager
        return manager.create_sender(bootstrap.room)

    def create_receiver(self, bootstrap: Bootstrap) -> KVReceiver:
        """As create_sender; begins to look for the prefill server at once."""
        manager = self._fake if self.is_fake(bootstrap) else self.manager
        receiver = manager.create_receiver(bootstrap.room, f"{bracketed(bootstrap.host)}:{bootstrap.port}")
        receiver.init(bootstrap.prefill_dp_rank)
        return receiver

    def poll(self, ends: Sequence[KVSender | KVReceiver]) -> list[KVPoll]:
        """The states, each the lowest that any rank of the group has."""
        if not ends:
            return []
        return [KVPoll(value) for value in self._min_reduce([int(end.poll()) for end in ends])]

    def failure(self, end: KVSender | KVReceiver) -> tuple[str, int]:
        """Why a room is Failed on the whole group, where on this rank all may have gone well; forgets the room.

        With it the HTTP status: STATUS_UNFIT where the same two servers would fail again.
        """
        error = end.failure()
        return error.reason or "another rank of this server has failed", STATUS_UNFIT if error.unfit else 500

    def all_safe(self, receivers: Sequence[KVReceiver]) -> list[bool]:
        """Whether on every rank of the group no writer can touch the receivers' pages."""
        if not receivers:
            return []
        return [bool(value) for value in self._min_reduce([int(receiver.release_safe()) for receiver in receivers])]

    def count_success(self, tokens: int, started: float) -> None:
        """tokens: whose KV was handed over. started: `time.monotonic()` when the pages were first offered."""
        self.completed_total += 1
        self.tokens_total += tokens
        self.seconds_total += time.monotonic() - started

    def totals(self) -> dict[str, int | float]:
        """The counters, and the rooms there are, as fields of a LoadReport."""
        return {
            "transfer_rooms": self.num_rooms,
            "transfers_total": self.completed_total,
            "transfer_failures_total": self.failed_total,
            "transferred_tokens_total": self.tokens_total,
            "transfer_seconds_total": self.seconds_total,
        }

    @property
    def num_rooms(self) -> int:
        return self.manager.num_rooms() + (0 if self._fake is self.manager else self._fake.num_rooms())

    def close(self) -> None:
        self.manager.close()
        if self._fake is not self.manager:
            self._fake.close()


def make_hand_over(
    config: EngineConfig,
    address: HandOverAddress,
    groups: RankGroups,
    kv_cache: KVCache,
    max_requests: int,
    model: str,
    total_kv_heads: int,
) -> HandOver:
    """The hand-over of a rank in the role of `config.disaggregation_mode`. OSError or ValueError when it cannot be.

    model: what both sides must have in common; compared as text. total_kv_heads: of the whole model.
    """
    role: Role = "prefill" if config.disaggregation_mode == "prefill" else "decode"
    rows = MetadataRows(max_requests)
    regions = kv_cache.regions(config.page_size)
    args = KVArgs(
        model=model,
        page_size=config.page_size,
        kv_dtype=str(kv_cache.dtype).removeprefix("torch."),
        kv_layout="layers of [page, token, head, width]",
        kv_data_ptrs=regions.addresses,
        kv_data_lens=regions.num_bytes,
        kv_item_lens=regions.page_bytes,
        kv_layer_ids=regions.layers,
        kv_head_num=kv_cache.spec.num_kv_heads,
        total_kv_head_num=total_kv_heads,
        aux_data_ptrs=[rows.array.ctypes.data],
        aux_data_lens=[rows.array.nbytes],
        aux_item_lens=[rows.array.strides[0]],
        tp_rank=groups.attention.rank,
        tp_size=groups.attention.size,
        dp_rank=groups.dp_rank,
        dp_size=groups.dp_size,
        device=str(kv_cache.device),
    )
    options = TransferOptions(
        host=address.host,
        num_connections=config.disaggregation_num_connections,
        checksum=config.disaggregation_checksum,
        bootstrap_timeout=config.disaggregation_bootstrap_timeout,
        waiting_timeout=config.disaggregation_waiting_timeout,
        heartbeat_interval=config.disaggregation_heartbeat_interval,
        heartbeat_failures=config.disaggregation_heartbeat_failures,
        ib_device=config.disaggregation_ib_device or "",
    )
    factory = kv_manager_class(config.disaggregation_transfer_backend)
    manager = factory(args, role, options, address.bootstrap or None, address.incarnation or None)
    terms = {
        "--disaggregation-transfer-backend": config.disaggregation_transfer_backend,
        "model": model,
        "--page-size": str(args.page_size),
        "KV data type": args.kv_dtype,
        "number of layers": str(len(set(args.kv_layer_ids))),
        "number of KV heads": str(total_kv_heads),
    }
    # Nobody meets on the fake path.
    meets = config.disaggregation_transfer_backend != "fake"
    return HandOver(manager, rows, groups.attention.min_reduce, terms if meets else None)


def model_fingerprint(architecture: str, path: str, load_format: str) -> str:
    """Text that two servers of the same model share, whatever files it is in and whichever dtype they compute in.

    ModelError for a path and a load format that are none of `load_model`.
    """
    return f"{architecture}, configuration {model_digest(path)}, weights {weights_digest(path, load_format)}"
