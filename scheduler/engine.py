"""The whole engine of one rank in this process: model, memory, scheduler and the two step loops.

The rank process (`scheduler.rank`) drives it from messages; tests and benchmarks drive it directly.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

import models
from layers.attention import AttentionBackend, TorchAttention
from layers.host_memory import available_memory
from layers.kv_cache import KVCache, KVSpec
from layers.linear import pack_weights
from layers.moe import RecordingLimit, recording_limit, reserve_rows
from layers.moe.rebalance import Rebalancer
from layers.parallel import ParallelGroups
from layers.process_groups import ALONE, RankGroups
from models.base import ModelInfo
from models.decoder import DecoderLM
from scheduler.batch import Batch
from scheduler.config import EngineConfig, HandOverAddress
from scheduler.cuda_graph import DecodeGraphs
from scheduler.decode_scheduler import DecodeScheduler
from scheduler.decode_tapes import DecodeTapes
from scheduler.hand_over import HandOver, make_hand_over, model_fingerprint
from scheduler.lockstep import Lockstep
from scheduler.memory import KVMemory
from scheduler.messages import Finish, GenerateRequest, RequestOutput, SamplingParams, TokenLogprobs
from scheduler.model_runner import ModelRunner, PendingResult
from scheduler.prefill_scheduler import PrefillScheduler
from scheduler.recorder import CudaRecorder, Recorder
from scheduler.scheduler import Scheduler, SchedulerLimits
from scheduler.step_plan import StepPlan

logger = logging.getLogger(__name__)

_CPU_KV_BYTES = 4 << 30
_DEFAULT_RUNNING = {"cpu": 256, "cuda": 512}
_DEFAULT_CHUNK = {"cpu": 512, "cuda": 8192}


class EngineError(ValueError):
    """A setting that cannot work, in one line that says what to change."""


@dataclass
class Generation:
    """One request's whole result."""

    token_ids: list[int]
    finish: Finish
    logprobs: list[float | None]
    top_logprobs: list[list[tuple[int, float]]]
    prompt_logprobs: TokenLogprobs | None
    cached_tokens: int


class _KVSpace(NamedTuple):
    """KV tokens that a rank can hold. taken, total: bytes of its GPU's memory where that sets them; else 0."""

    tokens: int
    taken: int = 0
    total: int = 0


class Engine:
    """Load with `Engine(config)`, then `submit` and `step` until `is_idle`.

    phase: what the step is doing, in words.
    publish_early: takes what is known before a step computes, such as first tokens that came with their KV, which then
        do not wait for the step; None to get it from `step`.
    is_stalled: the last step found nothing to launch and no result to wait for; only a message or a transfer's progress
        changes that.
    """

    def __init__(
        self,
        config: EngineConfig,
        address: HandOverAddress | None = None,
        groups: RankGroups = ALONE,
        recorder: Recorder | None = None,
    ) -> None:
        """ModelError for a bad checkpoint, EngineError for settings that cannot work; both are ValueErrors.

        address: for the roles "prefill" and "decode".
        groups: with more than one rank, every rank makes its engine at the same time, and then the same calls.
        recorder: what records decode passes; None takes CUDA graphs where `config` has them.
        """
        self.config = config
        self.groups = groups
        self.device = resolve_device(config.device, config.base_gpu_id + groups.local_rank)
        if self.device.type == "cpu":
            torch.set_num_threads(config.num_threads or len(os.sched_getaffinity(0)))
        model_groups = replace(groups.model, moe=config.moe_options())
        started = time.monotonic()
        model, info = self._load(model_groups)
        self.load_seconds = time.monotonic() - started
        self.info: ModelInfo = info
        running = config.max_running_requests or _DEFAULT_RUNNING[self.device.type]
        num_pages, self.context_length = self._plan_memory(running)
        self.memory, kv_cache = self._allocate(num_pages, running)
        attention = _make_attention(config.attention_backend, self.device)
        self.runner = ModelRunner(model, info, kv_cache, self.memory, attention, self.device)
        limits = self._limits()
        # Requests of a prefill server go elsewhere to decode.
        decoding = 0 if config.disaggregation_mode == "prefill" else running
        try:
            reserve_rows(model, limits.most_rows(decoding))
        except ValueError as error:
            raise EngineError(str(error)) from None
        self._rebalancer = Rebalancer.of(model, model_groups, max(1, groups.layout.tp_size // groups.local_size))
        self.scheduler = Scheduler(self.memory, limits, info.eos_token_ids)
        disable_overlap = config.disable_overlap_schedule
        self.overlap = self.device.type == "cuda" if disable_overlap is None else not disable_overlap
        self._pending: PendingResult | None = None
        self._outputs: list[RequestOutput] = []  # of the step before
        self.is_stalled = False
        self.phase = ""
        self.publish_early: Callable[[list[RequestOutput]], None] | None = None
        if recorder is None and config.uses_cuda_graphs(self.device.type):
            recorder = CudaRecorder(self.device)
        recorded_sizes = self._record_decode(recorder, model, running) if recorder is not None else []
        if config.uses_decode_tapes(self.device.type) and recorder is None and attention.can_record(kv_cache):
            self.runner.graphs = DecodeTapes(self.runner, self._most_recorded(running))
        self.lockstep = Lockstep(groups, recorded_sizes) if groups.layout.dp_size > 1 else None
        self._warm_up()
        self.hand_over: HandOver | None = None
        if config.disaggregation_mode == "null":
            self.scheduler = Scheduler(self.memory, limits, info.eos_token_ids)  # with counters at zero
        else:
            self.hand_over = self._make_hand_over(address or HandOverAddress())
            self.scheduler = self._role_scheduler(limits, self.hand_over)

    def _load(self, groups: ParallelGroups) -> tuple[DecoderLM, ModelInfo]:
        """This rank's model, its weights laid out for the device."""
        config = self.config
        try:
            model, info = models.load_model(
                config.model_path,
                load_format=config.load_format,
                dtype=config.dtype,
                device=self.device,
                groups=groups,
                progress=models.progress_bar() if self.groups.rank == 0 else None,
            )
        except torch.OutOfMemoryError as error:
            raise EngineError(
                f"the weights of {config.model_path} do not fit in the memory that is free on the GPU: free some, or "
                "split them over more GPUs with --tp-size"
            ) from error
        pack_weights(model)
        return model, info

    def _record_decode(self, recorder: Recorder, model: torch.nn.Module, running: int) -> list[int]:
        """Record decode passes of up to `running` requests; returns their numbers of requests, ascending, the same on
        every rank. There are none where the attention or an expert backend cannot be recorded; a line says why."""
        runner, dp_size = self.runner, self.groups.layout.dp_size
        most = self._most_recorded(running)
        limit = recording_limit(model)
        if not runner.attention.can_record(runner.kv_cache):
            limit = RecordingLimit(0, f"--attention-backend {self.config.attention_backend} waits for lengths")
        if limit is not None and limit.rows == 0:
            logger.info("no decode graphs: %s", limit.reason)
        elif limit is not None and limit.rows < most:
            logger.info("decode graphs for at most %d requests, not %d: %s", limit.rows, most, limit.reason)
        most = most if limit is None else min(most, limit.rows)
        most = self.groups.world.min_reduce([most])[0]
        if most == 0:
            return []
        knows_rows = dp_size > 1 or self.config.enable_eplb  # padding rows would count as load
        try:
            graphs = DecodeGraphs.capture(runner, recorder, most, dp_size if knows_rows else None)
        except torch.OutOfMemoryError as error:
            raise EngineError(
                f"--mem-fraction-static {self.config.mem_fraction_static} leaves too little memory for decode graphs "
                f"of up to {most} requests; lower it or --cuda-graph-max-bs"
            ) from error
        runner.graphs = graphs
        return graphs.sizes

    def _most_recorded(self, running: int) -> int:
        """Requests of the largest decode batch that is recorded, of up to `running`."""
        return min(self.config.cuda_graph_max_bs or 256, running)

    def _warm_up(self) -> None:
        """One short request, so that no client waits for what is compiled or allocated on first use."""
        length = min(2, self.context_length - 1)
        self.generate([[0]], [SamplingParams(max_new_tokens=length, seed=0, temperature=0.0, ignore_eos=True)])
        self.memory.flush_cache()

    def submit(self, request: GenerateRequest) -> None:
        self.scheduler.add(request)

    @property
    def is_idle(self) -> bool:
        """No live request and no step under way, here and on the data-parallel ranks that this one steps with."""
        if self.lockstep is not None and self.lockstep.is_busy:
            return False
        return self.scheduler.is_idle and self._pending is None

    def step(self) -> list[RequestOutput]:
        """Launch one step and return what became known: in the overlap loop, the results of the step before it."""
        self.phase = "scheduling"
        batch = self.scheduler.next_batch()
        outputs = self.scheduler.take_early_outputs()
        if outputs and self.publish_early is not None:
            self.publish_early(outputs)
            outputs = []
        self.is_stalled = batch is None and self._pending is None
        self.phase = "the agreement on a plan"
        plan = self._agree(batch)
        self.phase = "the forward pass"
        rows = plan.rows() if plan is not None and plan.runs else None
        if batch is None and rows is not None:
            self.runner.launch_idle(rows)
        launched = self.runner.launch(batch, rows) if batch is not None else None
        if self._rebalancer is not None and (batch is not None or rows is not None):
            self._rebalancer.after_pass()
        self.phase = "waiting for results"
        if self.overlap:
            finished, self._pending = self._pending, launched
        else:
            finished = launched
        outputs += self.scheduler.take_early_outputs()
        if finished is not None:
            outputs += self.scheduler.process(finished.batch, finished.wait())
        self._outputs = outputs
        return outputs

    def _agree(self, batch: Batch | None) -> StepPlan | None:
        if self.lockstep is None:
            return None
        plan = self.lockstep.agree(self.scheduler, batch, self._outputs, self._pending is not None)
        self.is_stalled = not plan.runs and not plan.any_pending
        return plan

    def close(self) -> None:
        """End what runs outside the steps."""
        if self.hand_over is not None:
            self.hand_over.close()

    def _limits(self) -> SchedulerLimits:
        config = self.config
        chunk = config.chunked_prefill_size or _DEFAULT_CHUNK[self.device.type]
        return SchedulerLimits(
            context_length=self.context_length,
            vocab_size=self.info.vocab_size,
            chunk_tokens=None if chunk < 0 else chunk,
            prefill_tokens=config.max_prefill_tokens,
            queued=config.max_queued_requests,
            policy=config.schedule_policy,
            conservativeness=config.schedule_conservativeness,
        )

    def _make_hand_over(self, address: HandOverAddress) -> HandOver:
        config = self.config
        fingerprint = model_fingerprint(self.info.architecture, config.model_path, config.load_format)
        try:
            return make_hand_over(
                config,
                address,
                self.groups,
                self.runner.kv_cache,
                self.memory.max_requests,
                fingerprint,
                self.info.total_kv_heads,
            )
        except (OSError, ValueError) as error:
            raise EngineError(str(error)) from error

    def _role_scheduler(self, limits: SchedulerLimits, hand_over: HandOver) -> Scheduler:
        eos = self.info.eos_token_ids
        if self.config.disaggregation_mode == "prefill":
            return PrefillScheduler(self.memory, limits, eos, hand_over)
        return DecodeScheduler(self.memory, limits, eos, hand_over, self.config.num_reserved_decode_tokens)

    def generate(
        self, prompts: list[list[int]], params: list[SamplingParams], **options: int | bool
    ) -> list[Generation]:
        """Run the prompts together to their ends; results in order. `options` are further GenerateRequest fields."""
        results: dict[str, Generation] = {}
        for i, (prompt, sampling) in enumerate(zip(prompts, params, strict=True)):
            results[str(i)] = Generation([], Finish(""), [], [], None, 0)
            self.submit(GenerateRequest(str(i), prompt, sampling, **options))  # type: ignore[arg-type]
        unfinished = len(results)
        if self.lockstep is not None:
            self.lockstep.is_busy = True  # other ranks may have prompts where this one has none
        while unfinished or not self.is_idle:
            for output in self.step():
                result = results[output.rid]
                result.token_ids += output.token_ids
                result.cached_tokens = max(result.cached_tokens, output.cached_tokens)
                result.prompt_logprobs = output.prompt_logprobs or result.prompt_logprobs
                if output.logprobs is not None:
                    result.logprobs += output.logprobs.logprobs
                    result.top_logprobs += output.logprobs.top
                if output.finish is not None:
                    result.finish = output.finish
                    unfinished -= 1
        return [results[str(i)] for i in range(len(prompts))]

    def _plan_memory(self, running: int) -> tuple[int, int]:
        """(KV pages, longest prompt plus output of a request) for `running` requests; EngineError where none fits."""
        config, info = self.config, self.info
        context = config.context_length or info.context_length
        if context > info.context_length:
            raise EngineError(f"--context-length {context} is above the model's limit, {info.context_length}")
        if config.max_total_tokens is not None:
            own = _KVSpace(config.max_total_tokens)
        else:
            own = self._kv_space(info.kv_spec, info.dtype, context, running)
        # Ranks admit the same requests, so the one with the least memory sets the limit for all. One that has none
        # tells the others before it refuses: they would wait for it.
        spaces = [_KVSpace(*values) for values in self.groups.world.all_gather(own)]
        least = min(spaces)
        num_pages = least.tokens // config.page_size
        if num_pages < 1 and least.total:
            raise EngineError(
                f"--mem-fraction-static {config.mem_fraction_static} leaves no memory for KV on rank "
                f"{spaces.index(least)}: {least.taken / 2**30:.1f} GiB of {least.total / 2**30:.1f} GiB are taken; "
                "raise it or free memory"
            )
        if num_pages < 1:
            raise EngineError(
                f"{least.tokens} KV tokens do not make one page of {config.page_size} tokens; raise --max-total-tokens "
                "or lower --page-size"
            )
        # A single request can always have the whole pool, so nothing admitted can ever run out of memory alone.
        return num_pages, min(context, num_pages * config.page_size)

    def _kv_space(self, spec: KVSpec, dtype: torch.dtype, context: int, running: int) -> _KVSpace:
        """Of this rank's device. On a GPU, decode graphs and the buffers of a step are in what it leaves."""
        most = context * running
        if self.device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self.device)
            budget = max(0, int(total * self.config.mem_fraction_static) - (total - free))
            tokens = budget // spec.bytes_per_token(dtype)
            return _KVSpace(tokens, total - free, total) if tokens < most else _KVSpace(most)
        budget = min(_CPU_KV_BYTES, available_memory() // 4) // self.groups.local_size
        return _KVSpace(min(budget // spec.bytes_per_token(dtype), most))

    def _allocate(self, num_pages: int, running: int) -> tuple[KVMemory, KVCache]:
        """The pages and the tensors behind them, for `running` requests. EngineError where they do not fit."""
        config, spec, dtype = self.config, self.info.kv_spec, self.info.dtype
        slots = (num_pages + 1) * config.page_size
        wanted = slots * spec.bytes_per_token(dtype) + (1 + running) * self.context_length * torch.int32.itemsize
        what = f"{num_pages * config.page_size} KV tokens and the tables of {running} requests take {_gib(wanted)}"
        remedy = "lower --max-total-tokens or --max-running-requests"
        if self.device.type == "cpu":
            # The kernel promises more memory than it has, and ends the process that uses it.
            free = available_memory() // self.groups.local_size
            if wanted > free:
                raise EngineError(f"{what}, and {_gib(free)} of memory are free for each rank: {remedy}")
        try:
            memory = KVMemory(
                num_pages,
                config.page_size,
                running,
                self.context_length,
                self.device,
                use_prefix_cache=_uses_prefix_cache(config),
            )
            return memory, KVCache(spec, slots, dtype, self.device)
        except torch.OutOfMemoryError as error:
            raise EngineError(f"{what}, more than the GPU has left: {remedy}") from error


def _gib(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"


def _uses_prefix_cache(config: EngineConfig) -> bool:
    if config.disaggregation_mode == "decode" and not config.disaggregation_decode_enable_radix_cache:
        return False
    return not config.disable_radix_cache


def resolve_device(name: str, index: int = 0) -> torch.device:
    """name: as `EngineConfig.device`. index: which of the host's devices. EngineError when it is not there."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise EngineError("--device cuda: torch finds no CUDA device here; use --device cpu")
    if name == "cuda":
        count = torch.cuda.device_count()
        if index >= count:
            raise EngineError(
                f"every rank needs a GPU of its own, and this host has {count}: lower --tp-size or --base-gpu-id"
            )
        torch.cuda.set_device(index)
        return torch.device(name, index)
    return torch.device(name)


def _make_attention(name: str, device: torch.device) -> AttentionBackend:
    if name == "auto":
        name = "triton" if device.type == "cuda" else "cpu"
    if name == "torch":
        return TorchAttention()
    if name == "cpu":
        from layers.attention.cpu_backend import CpuAttention

        return CpuAttention()
    from layers.attention.triton_backend import TritonAttention

    return TritonAttention()
