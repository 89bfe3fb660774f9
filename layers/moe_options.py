"""Settings of the mixture-of-experts layers, chosen by command-line flags of the same names."""

from __future__ import annotations

from dataclasses import dataclass

from layers.parallel_layout import ParallelLayout

A2A_BACKENDS = ("none", "deepep", "megamoe")
DEEPEP_MODES = ("auto", "normal", "low_latency")
DEEPEP_TRANSPORTS = ("auto", "collective", "library")
MEGA_MOE_KERNELS = ("triton", "deep_gemm")
QUANTIZATIONS = ("fp8",)
DISPATCH_ALGORITHMS = ("static", "dynamic", "fake")


@dataclass(frozen=True)
class MoEOptions:
    """How rows reach the ranks that hold their experts; ValueError for settings that contradict each other.

    a2a_backend: a name of `layers.moe.registry`; None means "none".
    deepep_mode: "normal" exchanges row counts first, "low_latency" sends a fixed number of rows, "auto" takes the
        second for steps in which no rank computes prompt tokens.
    deepep_max_tokens_per_rank: most rows a rank may send in the low-latency layout.
    deepep_transport: what carries rows: "auto" peers' memory between GPUs of one host and collectives elsewhere,
        "collective" collectives everywhere, "library" the DeepEP library.
    mega_moe_max_tokens_per_rank: most rows a rank may have in a step with the fused backend; None takes the most that
        the scheduler can make.
    mega_moe_kernel: the fused backend on GPUs: "triton" our own, "deep_gemm" the library's with float8 weights.
    quantization: "fp8" keeps the experts of a block-fp8 checkpoint in float8 with their scales; None gives them the
        model's dtype when they are loaded.
    dispatch_algorithm: which of an expert's replicas a row goes to: "static" the same one for all rows of a rank,
        "dynamic" each in turn, "fake" ignores the router and spreads rows evenly over all experts (for benchmarks).
        None: "dynamic" with backend "none", otherwise "static".
    num_redundant_experts: physical experts beyond the model's own; they hold further copies of some.
    enable_eplb: count the rows of each expert and move experts between ranks to even them out.
    eplb_rebalance_num_iterations: forward passes between two rebalancings.
    """

    a2a_backend: str | None = None
    deepep_mode: str = "auto"
    deepep_max_tokens_per_rank: int = 128
    deepep_transport: str = "auto"
    mega_moe_max_tokens_per_rank: int | None = None
    mega_moe_kernel: str = "triton"
    quantization: str | None = None
    dispatch_algorithm: str | None = None
    num_redundant_experts: int = 0
    enable_eplb: bool = False
    eplb_rebalance_num_iterations: int = 1000

    def __post_init__(self) -> None:
        for flag, value, known in (
            ("--moe-a2a-backend", self.backend_name, A2A_BACKENDS),
            ("--deepep-mode", self.deepep_mode, DEEPEP_MODES),
            ("--deepep-transport", self.deepep_transport, DEEPEP_TRANSPORTS),
            ("--mega-moe-kernel", self.mega_moe_kernel, MEGA_MOE_KERNELS),
            ("--quantization", self.quantization, (None, *QUANTIZATIONS)),
            ("--ep-dispatch-algorithm", self.replica_choice, DISPATCH_ALGORITHMS),
        ):
            if value not in known:
                raise ValueError(f"{flag} {value} is not one of {', '.join(filter(None, known))}")
        for flag, value, least in (
            ("--deepep-max-tokens-per-rank", self.deepep_max_tokens_per_rank, 1),
            ("--mega-moe-max-tokens-per-rank", self.mega_moe_max_tokens_per_rank, 1),
            ("--ep-num-redundant-experts", self.num_redundant_experts, 0),
            ("--eplb-rebalance-num-iterations", self.eplb_rebalance_num_iterations, 1),
        ):
            if value is not None and value < least:
                raise ValueError(f"{flag} {value} must be at least {least}")
        if self.mega_moe_kernel == "deep_gemm" and self.enable_eplb:
            raise ValueError(
                "--enable-eplb cannot move the experts that --mega-moe-kernel deep_gemm has converted: leave one out"
            )
        if self.backend_name == "none" and self.replica_choice == "static":
            raise ValueError(
                "--ep-dispatch-algorithm static does not go with --moe-a2a-backend none: every rank has all rows "
                "there, and they have to choose the same replica; use dynamic"
            )

    def check_layout(self, layout: ParallelLayout) -> None:
        """ValueError where the backend cannot serve it."""
        name = self.backend_name
        if name != "none" and layout.expert_tp_size > 1:
            raise ValueError(
                f"--moe-a2a-backend {name} sends rows to whole experts: leave --ep-size {layout.ep_size} out, or "
                f"set it to --tp-size {layout.tp_size}"
            )

    @property
    def backend_name(self) -> str:
        return "none" if self.a2a_backend is None else self.a2a_backend

    @property
    def replica_choice(self) -> str:
        if self.dispatch_algorithm is not None:
            return self.dispatch_algorithm
        return "dynamic" if self.backend_name == "none" else "static"
