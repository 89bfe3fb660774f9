"""Native CPU kernels: norms, gates, rotary positions, packed bf16 linear layers, paged attention, argmax, penalties.

Each function has the signature of its torch counterpart and is tested against it. `usable(x)` says whether they may be
called for a tensor; where they cannot be compiled every layer takes its torch path and one log line says so.

Shape letters: T token rows, H width, I input and O output features, N query heads, K key/value heads, D head width.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import mmap

import torch

from layers.kernels.cpu.build import BuildError, load
from layers.kernels.cpu.tape import call, empty

logger = logging.getLogger(__name__)

DTYPES = {torch.float32: 0, torch.bfloat16: 1}
_POINTER, _INT64, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float

# Width of a block of input features and of a group of output features in the packed layout.
_GEMM_BLOCK, _GEMM_GROUP = 32, 32
GEMM_NONE, GEMM_AVX512, GEMM_AMX = 0, 1, 2


class AttentionArgs(ctypes.Structure):
    """`struct attention_args` of attention.c, field by field."""

    _fields_ = (
        *((name, _POINTER) for name in ("q", "k", "v", "k_cache", "v_cache", "out", "slots", "request_table")),
        *((name, _POINTER) for name in ("request_rows", "seq_lens", "query_start", "tasks")),
        *((name, _INT64) for name in ("q_row", "q_head", "k_row", "k_head", "v_row", "v_head")),
        *((name, _INT64) for name in ("k_cache_slot", "k_cache_head", "v_cache_slot", "v_cache_head", "table_row")),
        *((name, _INT64) for name in ("num_tokens", "num_tasks", "rows_per_task")),
        *((name, _INT64) for name in ("num_heads", "num_kv_heads", "head_dim", "v_head_dim")),
        ("scale", _FLOAT),
        ("dtype", ctypes.c_int32),
        ("num_threads", ctypes.c_int32),
    )


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels, or None after one log line where they cannot be had."""
    try:
        loaded = load()
    except BuildError as error:
        logger.warning("CPU kernels are not available, torch is used instead (slower): %s", error)
        return None
    return declare(loaded)


def declare(loaded: ctypes.CDLL) -> ctypes.CDLL:
    """Give the functions their C types and choose the fastest matrix instructions."""
    rows = [_POINTER, _INT64]  # a matrix: its data and its row stride
    heads = [_POINTER, _INT64, _INT64, _INT64]  # row stride, head stride, number of heads
    tail = [_INT, _INT]  # dtype, number of threads
    signatures = {
        "lockstep_rms_norm": [*heads, *rows, _POINTER, _FLOAT, _INT64, _INT64, *rows, *tail],
        "lockstep_silu_and_mul": [*rows, _INT64, _INT64, *rows, *tail],
        "lockstep_rotary": [*heads, *heads, *rows, _INT64, _INT64, _INT, _POINTER, _POINTER, *tail],
        "lockstep_gemm_pack": [*rows, _INT64, _INT64, _POINTER],
        "lockstep_gemm": [*rows, _INT64, _POINTER, _INT64, _INT64, _POINTER, *rows, *tail],
        "lockstep_gemm_gated": [*rows, _INT64, _POINTER, _INT64, _INT64, _POINTER, *rows, _INT],
        "lockstep_argmax": [*rows, _INT64, _INT64, _POINTER, _POINTER, _INT],
        "lockstep_penalize": [*rows, *rows, _POINTER, _POINTER, _POINTER, _INT64, _INT64, ctypes.c_int32, _INT],
    }
    for name, types in signatures.items():
        function = getattr(loaded, name)
        function.argtypes, function.restype = types, None
    loaded.lockstep_gemm_packed_size.argtypes, loaded.lockstep_gemm_packed_size.restype = [_INT64, _INT64], _INT64
    loaded.lockstep_gemm_init.argtypes, loaded.lockstep_gemm_init.restype = [_INT], _INT
    loaded.lockstep_attention.argtypes, loaded.lockstep_attention.restype = [_POINTER], _INT
    loaded.gemm_level = loaded.lockstep_gemm_init(GEMM_AMX)
    return loaded


def usable(x: torch.Tensor) -> bool:
    """Whether the kernels take this tensor: on the CPU, of float32 or bfloat16, and compiled."""
    return x.is_cpu and x.dtype in DTYPES and library() is not None


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See layers.norm.rms_norm."""
    if x.dim() in (2, 3):
        return _rms_norm(x, None, weight, eps)
    return _rms_norm(x.reshape(-1, x.shape[-1]), None, weight, eps).view(x.shape)


def fused_add_rms_norm(
    x_TH: torch.Tensor, residual_TH: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See layers.norm.fused_add_rms_norm; the residual is updated in place."""
    residual_TH = _dense_rows(residual_TH)
    return _rms_norm(x_TH, residual_TH, weight, eps), residual_TH


def _rms_norm(x: torch.Tensor, residual_TH: torch.Tensor | None, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [T, H] or, without a residual, [T, N, H]."""
    x = _dense_rows(x)
    rows, width = x.shape[0], x.shape[-1]
    heads, head_stride = (x.shape[1], x.stride(1)) if x.dim() == 3 else (1, 0)
    out = empty(*x.shape, dtype=x.dtype)
    call(
        library().lockstep_rms_norm,
        x.data_ptr(),
        x.stride(0),
        head_stride,
        heads,
        None if residual_TH is None else residual_TH.data_ptr(),
        0 if residual_TH is None else residual_TH.stride(0),
        weight.data_ptr(),
        eps,
        rows,
        width,
        out.data_ptr(),
        width,
        DTYPES[x.dtype],
        torch.get_num_threads(),
    )
    return out


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """See layers.activation.silu_and_mul."""
    x_TI = _dense_rows(gate_up if gate_up.dim() == 2 else gate_up.reshape(-1, gate_up.shape[-1]))
    rows, width = x_TI.shape[0], x_TI.shape[1] // 2
    out_TI = empty(rows, width, dtype=x_TI.dtype)
    call(
        library().lockstep_silu_and_mul,
        x_TI.data_ptr(),
        x_TI.stride(0),
        rows,
        width,
        out_TI.data_ptr(),
        width,
        DTYPES[x_TI.dtype],
        torch.get_num_threads(),
    )
    return out_TI if gate_up.dim() == 2 else out_TI.view(*gate_up.shape[:-1], width)


def apply_rotary(
    q_TND: torch.Tensor, k_TKD: torch.Tensor, cos_sin_TD: torch.Tensor, interleaved: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """See layers.rotary.apply_rotary."""
    q_TND, k_TKD, cos_sin_TD = _dense_rows(q_TND), _dense_rows(k_TKD), _dense_rows(cos_sin_TD)
    rows, q_heads, width = q_TND.shape
    k_heads = k_TKD.shape[1]
    q_out = empty(rows, q_heads, width, dtype=q_TND.dtype)
    k_out = empty(rows, k_heads, width, dtype=q_TND.dtype)
    q_row, q_head, _ = q_TND.stride()
    k_row, k_head, _ = k_TKD.stride()
    call(
        library().lockstep_rotary,
        q_TND.data_ptr(),
        q_row,
        q_head,
        q_heads,
        k_TKD.data_ptr(),
        k_row,
        k_head,
        k_heads,
        cos_sin_TD.data_ptr(),
        cos_sin_TD.stride(0),
        rows,
        width,
        interleaved,
        q_out.data_ptr(),
        k_out.data_ptr(),
        DTYPES[q_TND.dtype],
        torch.get_num_threads(),
    )
    return q_out, k_out


def argmax(x_BV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(index [B] int64, finite [B] bool) of the first largest number of each float32 row; a NaN counts as larger than
    any. `finite` tells whether that number is neither infinite nor NaN.
    """
    x_BV = _dense_rows(x_BV)
    rows, width = x_BV.shape
    index_B = empty(rows, dtype=torch.int64)
    finite_B = empty(rows, dtype=torch.bool)
    call(
        library().lockstep_argmax,
        x_BV.data_ptr(),
        x_BV.stride(0),
        rows,
        width,
        index_B.data_ptr(),
        finite_B.data_ptr(),
        torch.get_num_threads(),
    )
    return index_B, finite_B


def penalize(
    logits_BV: torch.Tensor,
    counts_SV: torch.Tensor,
    rows_N: torch.Tensor,
    slots_N: torch.Tensor,
    penalties_N3: torch.Tensor,
    output_bits: int,
) -> None:
    """Change rows of the float32 logits in place; see layers.penalties. counts int32, rows and slots int64, penalties
    float32 (frequency, presence, repetition). output_bits: those of a count that count the output.
    """
    call(
        library().lockstep_penalize,
        logits_BV.data_ptr(),
        logits_BV.stride(0),
        counts_SV.data_ptr(),
        counts_SV.stride(0),
        rows_N.data_ptr(),
        slots_N.data_ptr(),
        penalties_N3.data_ptr(),
        len(rows_N),
        logits_BV.shape[1],
        output_bits,
        torch.get_num_threads(),
    )


def attention(args: AttentionArgs) -> None:
    """Write new keys and values and attend, as attention.c says. MemoryError without memory for its scratch."""
    # The layers of a pass share one `args`.
    call(_attention, AttentionArgs.from_buffer_copy(args))


def _attention(args: AttentionArgs) -> None:
    if library().lockstep_attention(ctypes.byref(args)):
        raise MemoryError("no memory for the scratch of the attention kernel")


class PackedWeight:
    """A bf16 weight [O, I] laid out for the matrix kernel; takes the same memory when O is a multiple of 32."""

    def __init__(self, weight_OI: torch.Tensor) -> None:
        weight_OI = _dense_rows(weight_OI)
        self.out_features, self.in_features = weight_OI.shape
        size = library().lockstep_gemm_packed_size(self.out_features, self.in_features)
        self._data = _in_large_pages(size, torch.bfloat16)
        self._pointer = self._data.data_ptr()
        library().lockstep_gemm_pack(
            weight_OI.data_ptr(), weight_OI.stride(0), self.out_features, self.in_features, self._pointer
        )

    @property
    def data(self) -> torch.Tensor:
        """The laid-out numbers, [N] bfloat16; of another weight of the same shape they may be written over these."""
        return self._data

    @staticmethod
    def accepts(weight_OI: torch.Tensor) -> bool:
        """Whether the matrix kernel of this machine takes such a weight."""
        return (
            weight_OI.dtype == torch.bfloat16
            and usable(weight_OI)
            and weight_OI.shape[1] % _GEMM_BLOCK == 0
            and weight_OI.numel() > 0
            and library().gemm_level != GEMM_NONE
        )

    def linear(
        self, x_TI: torch.Tensor, bias: torch.Tensor | None = None, dtype: torch.dtype = torch.bfloat16
    ) -> torch.Tensor:
        """x @ weight.T + bias as [T, O] of `dtype` (bfloat16 or float32); x and bias bfloat16.

        A row's result does not depend on the other rows.
        """
        x_TI = _dense_rows(x_TI)
        rows = x_TI.shape[0]
        out_TO = empty(rows, self.out_features, dtype=dtype)
        call(
            library().lockstep_gemm,
            x_TI.data_ptr(),
            x_TI.stride(0),
            rows,
            self._pointer,
            self.out_features,
            self.in_features,
            None if bias is None else bias.data_ptr(),
            out_TO.data_ptr(),
            self.out_features,
            DTYPES[dtype],
            torch.get_num_threads(),
        )
        return out_TO

    def linear_silu_and_mul(self, x_TI: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """`silu_and_mul(self.linear(x_TI, bias))` to the bit, [T, O / 2], in one pass where O / 2 divides by 32."""
        width = self.out_features // 2
        if self.out_features % (2 * _GEMM_GROUP):
            return silu_and_mul(self.linear(x_TI, bias))
        x_TI = _dense_rows(x_TI)
        rows = x_TI.shape[0]
        out_TO = empty(rows, width, dtype=torch.bfloat16)
        call(
            library().lockstep_gemm_gated,
            x_TI.data_ptr(),
            x_TI.stride(0),
            rows,
            self._pointer,
            width,
            self.in_features,
            None if bias is None else bias.data_ptr(),
            out_TO.data_ptr(),
            width,
            torch.get_num_threads(),
        )
        return out_TO


def _in_large_pages(size: int, dtype: torch.dtype) -> torch.Tensor:
    """An uninitialised tensor [size] in memory for which the operating system is asked for pages of 2 MB.

    Weights are read from end to end in every step: with pages of 4 KB a tenth of that time goes to address translation.
    """
    memory = mmap.mmap(-1, size * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel built without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype)


def _dense_rows(x: torch.Tensor) -> torch.Tensor:
    """x with the last dimension contiguous; the kernels take any other stride."""
    return x if x.stride(-1) == 1 else x.contiguous()
