"""What a rank needs to know. The HTTP side's settings are `server.config.ServerConfig`, which holds one of these."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from layers.moe_options import MoEOptions
from layers.parallel_layout import LayoutError, ParallelLayout

LOAD_BALANCE_METHODS = ("auto", "round_robin", "total_tokens", "total_requests", "follow_bootstrap_room")
# Each is a process with memory of its own: many more would only bring the host down.
MAX_RANKS_PER_NODE = 64


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the engine, one field a command-line flag of the same name (underscores for dashes).

    model_path: folder of a checkpoint, or the name of a preset of `models.presets`.
    load_format: "auto" (safetensors) or "dummy" (random weights from config.json, seeded by tensor name).
    dtype: "auto" (the checkpoint's; bfloat16 where it says none), "bfloat16", "float16" or "float32".
    device: "auto" (cuda where there is one), "cpu" or "cuda".
    context_length: None takes the model's. page_size: tokens a KV page.
    mem_fraction_static: share of GPU memory for weights and KV. max_total_tokens: KV tokens; None derives it.
    max_running_requests, max_queued_requests: None derives the first and leaves the second unbounded.
    chunked_prefill_size: prompt tokens a step, -1 for unbounded, None for 512 on CPU and 8192 on CUDA.
    max_prefill_tokens: prompt tokens admitted a step.
    schedule_policy: "fcfs" or "lpm". schedule_conservativeness: above 1 reserves more for future output.
    disable_radix_cache: every prompt is computed whole, no prefix is kept.
    disable_overlap_schedule: None means plain loop on CPU, overlap on CUDA.
    attention_backend: "auto", "torch", "cpu" or "triton".
    disable_cuda_graph: decode steps run kernel by kernel, without CUDA graphs or, on a CPU, tapes. cuda_graph_max_bs:
        largest decode batch that has one, of each data-parallel group; None for 256, or max_running_requests where
        that is less.
    num_threads: CPU compute threads; None takes the cores this process may use.
    base_gpu_id: the CUDA device of the first rank; the others have those behind it.
    disaggregation_mode: "null" (one process does both), "prefill" or "decode".
    disaggregation_transfer_backend: the KV manager, a name of `disagg.registry.KV_MANAGERS`.
    disaggregation_num_connections, _checksum, _bootstrap_timeout, _waiting_timeout, _heartbeat_interval,
        _heartbeat_failures, _ib_device: see `disagg.base.TransferOptions`; times in seconds.
    disaggregation_decode_enable_radix_cache: the decode side keeps prefixes and is sent only what it lacks.
    num_reserved_decode_tokens: KV tokens the decode side keeps free for each resident request before it takes another.
    tp_size: ranks that share one model, each with a part of every layer.
    dp_size: with enable_dp_attention, groups of these ranks that have requests and KV of their own and share the
        experts; without, replicas of all tp_size ranks, which share nothing. Each has the limits above for itself.
    moe_dense_tp_size: ranks that split a dense MLP: 1, or None for those of a group.
    enable_dp_lm_head: the LM head works on a group's own rows, which it always does.
    load_balance_method: how a group or replica is chosen for a request, one of LOAD_BALANCE_METHODS; "auto" is
        "round_robin", and a prefill server always has "follow_bootstrap_room".
    ep_size: ranks that the routed experts are spread over, the columns of each being split over tp_size / ep_size
        ranks; None spreads whole experts over all ranks.
    moe_a2a_backend, deepep_mode, deepep_max_tokens_per_rank, deepep_transport, mega_moe_max_tokens_per_rank,
        mega_moe_kernel, quantization, ep_dispatch_algorithm, ep_num_redundant_experts, enable_eplb,
        eplb_rebalance_num_iterations: see `layers.moe_options.MoEOptions`.
    nnodes: hosts that the ranks are on, `ranks_per_node` each. node_rank: which of them this is; the HTTP server is on
        node 0. dist_init_addr: "host:port" of node 0 at which they meet.
    dist_timeout: seconds that ranks wait for each other.
    watchdog_timeout: seconds a forward pass may take before the rank reports its stack and exits.
    log_level: "debug", "info", "warning" or "error". log_requests: a line for each request.
    decode_log_interval: seconds between status lines under load.
    """

    model_path: str
    load_format: str = "auto"
    dtype: str = "auto"
    device: str = "auto"
    context_length: int | None = None
    page_size: int = 16
    mem_fraction_static: float = 0.85
    max_total_tokens: int | None = None
    max_running_requests: int | None = None
    max_queued_requests: int | None = None
    chunked_prefill_size: int | None = None
    max_prefill_tokens: int = 16384
    schedule_policy: str = "fcfs"
    schedule_conservativeness: float = 1.0
    disable_radix_cache: bool = False
    disable_overlap_schedule: bool | None = None
    attention_backend: str = "auto"
    disable_cuda_graph: bool = False
    cuda_graph_max_bs: int | None = None
    num_threads: int | None = None
    base_gpu_id: int = 0
    disaggregation_mode: str = "null"
    disaggregation_transfer_backend: str = "tcp"
    disaggregation_num_connections: int = 2
    disaggregation_checksum: bool = False
    disaggregation_bootstrap_timeout: float = 300.0
    disaggregation_waiting_timeout: float = 300.0
    disaggregation_heartbeat_interval: float = 2.0
    disaggregation_heartbeat_failures: int = 3
    disaggregation_ib_device: str | None = None
    disaggregation_decode_enable_radix_cache: bool = False
    num_reserved_decode_tokens: int = 512
    tp_size: int = 1
    dp_size: int = 1
    enable_dp_attention: bool = False
    ep_size: int | None = None
    moe_dense_tp_size: int | None = None
    enable_dp_lm_head: bool = False
    moe_a2a_backend: str | None = None
    deepep_mode: str = "auto"
    deepep_max_tokens_per_rank: int = 128
    deepep_transport: str = "auto"
    mega_moe_max_tokens_per_rank: int | None = None
    mega_moe_kernel: str = "triton"
    quantization: str | None = None
    ep_dispatch_algorithm: str | None = None
    ep_num_redundant_experts: int = 0
    enable_eplb: bool = False
    eplb_rebalance_num_iterations: int = 1000
    load_balance_method: str = "auto"
    nnodes: int = 1
    node_rank: int = 0
    dist_init_addr: str | None = None
    dist_timeout: float = 600.0
    watchdog_timeout: float = 300.0
    log_level: str = "info"
    log_requests: bool = False
    decode_log_interval: float = 5.0

    @property
    def num_replicas(self) -> int:
        return 1 if self.enable_dp_attention else self.dp_size

    @property
    def ranks_per_node(self) -> int:
        """Node i has those of the ranks of all replicas, in this order, that begin with number i * ranks_per_node."""
        return self.num_replicas * self.tp_size // self.nnodes

    def layout(self) -> ParallelLayout:
        """Of one replica. LayoutError when the sizes do not fit together."""
        self._check_nodes()
        return ParallelLayout(
            self.tp_size, self.dp_size if self.enable_dp_attention else 1, self.ep_size, self.moe_dense_tp_size
        )

    def uses_cuda_graphs(self, device_type: str) -> bool:
        """Whether every rank of an engine on "cpu" or "cuda" records its decode passes as CUDA graphs, as far as its
        attention and expert backends can be recorded."""
        return device_type == "cuda" and not self.disable_cuda_graph and self.disaggregation_mode != "prefill"

    def uses_decode_tapes(self, device_type: str) -> bool:
        """Whether an engine on "cpu" or "cuda" replays decode passes as tapes, as far as its model can be recorded."""
        alone = self.tp_size == 1  # tapes hold no collectives
        return device_type == "cpu" and alone and not self.disable_cuda_graph and self.disaggregation_mode != "prefill"

    def _check_nodes(self) -> None:
        if self.node_rank >= self.nnodes:
            raise LayoutError(f"--node-rank {self.node_rank} is not below --nnodes {self.nnodes}")
        if self.nnodes > 1 and not self.dist_init_addr:
            raise LayoutError(f"--nnodes {self.nnodes} needs --dist-init-addr HOST:PORT, where node 0 can be reached")
        if self.num_replicas == 1 and self.tp_size % self.nnodes:
            raise LayoutError(
                f"--tp-size {self.tp_size} is not a multiple of --nnodes {self.nnodes}: every node has as many ranks"
            )
        nodes_per_replica, rest = divmod(self.nnodes, self.num_replicas)
        if self.num_replicas % self.nnodes and (rest or self.tp_size % nodes_per_replica):
            raise LayoutError(
                f"--dp-size {self.dp_size} replicas of --tp-size {self.tp_size} ranks do not fit on --nnodes "
                f"{self.nnodes}: every node has as many whole replicas, or every replica is split over as many nodes"
            )
        if self.ranks_per_node > MAX_RANKS_PER_NODE:
            raise LayoutError(
                f"--tp-size {self.tp_size} and --dp-size {self.dp_size} make {self.ranks_per_node} ranks on a host, "
                f"over {MAX_RANKS_PER_NODE}: lower them, or spread the ranks over more --nnodes"
            )

    def moe_options(self) -> MoEOptions:
        """ValueError when they do not fit together or to the layout."""
        options = MoEOptions(
            a2a_backend=self.moe_a2a_backend,
            deepep_mode=self.deepep_mode,
            deepep_max_tokens_per_rank=self.deepep_max_tokens_per_rank,
            deepep_transport=self.deepep_transport,
            mega_moe_max_tokens_per_rank=self.mega_moe_max_tokens_per_rank,
            mega_moe_kernel=self.mega_moe_kernel,
            quantization=self.quantization,
            dispatch_algorithm=self.ep_dispatch_algorithm,
            num_redundant_experts=self.ep_num_redundant_experts,
            enable_eplb=self.enable_eplb,
            eplb_rebalance_num_iterations=self.eplb_rebalance_num_iterations,
        )
        options.check_layout(self.layout())
        return options


class HandOverAddress(msgspec.Struct, frozen=True):
    """How a rank of a prefill or decode server finds and is found by those of the other role.

    bootstrap: host:port where prefill ranks register; empty on a decode server.
    host: the address that the rank listens on and tells its peers.
    incarnation: the same for all ranks of one server, new at each start.
    Ranks on other hosts than node 0 learn the first and the last from rank 0.
    """

    bootstrap: str = ""
    host: str = "127.0.0.1"
    incarnation: str = ""


class Peers(msgspec.Struct, frozen=True):
    """How a rank finds the others of its engine.

    store_host, store_port: of their key-value store. store_fd: its listening socket, inherited by rank 0; else -1.
    steps: prefix of the ZeroMQ addresses at which ranks of this host get their steps; a rank's number follows.
    inbound: ZeroMQ addresses bound by the API process, one a data-parallel group of the replica, for its rank 0 to
        connect to; on the host of the API process.
    own_host: address of this host, for ranks on others; empty on one host.
    remote_outbound: on the host of the API process, where that takes the outputs of ranks on other hosts.
    remote_inbound: there too, as `inbound`, but a data-parallel group of any replica, for ranks 0 on other hosts.
    last_word: descriptor of a file in which the rank leaves its parent a line, which of the others it has lost; or -1.
    """

    store_host: str
    store_port: int
    steps: str
    inbound: list[str]
    store_fd: int = -1
    own_host: str = ""
    remote_outbound: str = ""
    remote_inbound: list[str] = []
    last_word: int = -1


class RankSettings(msgspec.Struct, frozen=True):
    """What a rank process is started with.

    inbound, outbound: ZeroMQ addresses bound by the parent process, which on node 0 is the API process.
    parent_pid: 0 when unknown.
    replica: number of this rank's engine, among which ranks are numbered anew.
    address: on prefill and decode servers. peers: of an engine of several ranks or hosts.
    name: of the server in log lines, where there are several. refusals: of that group, see `refusing`.
    """

    config: EngineConfig
    rank: int
    inbound: str
    outbound: str
    replica: int = 0
    parent_pid: int = 0
    address: HandOverAddress | None = None
    peers: Peers | None = None
    name: str = ""
    refusals: int = -1


@contextmanager
def refusing(refusals: int) -> Iterator[bool]:
    """Whether a process that refuses its settings or model is to say why: what one of a group says goes for all.

    The others wait until it has said it, because the group ends with the first process that does.

    refusals: descriptor of an empty file that the group has in common; -1 for a process that is in no group.
    """
    if refusals < 0:
        yield True
        return
    fcntl.lockf(refusals, fcntl.LOCK_EX)  # this process's until it unlocks or ends
    try:
        yield not os.pread(refusals, 1, 0)
        os.pwrite(refusals, b"!", 0)
    finally:
        fcntl.lockf(refusals, fcntl.LOCK_UN)


def bracketed(host: str) -> str:
    """The host as it stands before a port: IPv6 addresses in brackets."""
    return f"[{host}]" if ":" in host else host
