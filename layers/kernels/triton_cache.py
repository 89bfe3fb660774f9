"""Writing new keys and values to the paged cache in one launch.

Shape letters: T token rows, K key/value heads, D key width, E value width, S slots.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from layers.kernels.triton_widths import power_of_two_above


@triton.jit(do_not_specialize_on_alignment=["slots_ptr"])
def _store_kernel(
    k_ptr,
    v_ptr,
    slots_ptr,
    k_cache_ptr,
    v_cache_ptr,
    stride_kt,
    stride_kk,
    stride_vt,
    stride_vk,
    stride_ks,
    stride_vs,
    K: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    HAS_VALUE: tl.constexpr,
):
    """Program (token row): all its heads as one flat block. The caches hold a slot's heads contiguously."""
    t = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + t)
    i = tl.arange(0, BLOCK_D)
    key = tl.load(k_ptr + t * stride_kt + (i // D) * stride_kk + i % D, mask=i < K * D)
    tl.store(k_cache_ptr + slot * stride_ks + i, key.to(k_cache_ptr.dtype.element_ty), mask=i < K * D)
    if HAS_VALUE:
        i = tl.arange(0, BLOCK_E)
        value = tl.load(v_ptr + t * stride_vt + (i // E) * stride_vk + i % E, mask=i < K * E)
        tl.store(v_cache_ptr + slot * stride_vs + i, value.to(v_cache_ptr.dtype.element_ty), mask=i < K * E)


def store_kv(
    k_TKD: torch.Tensor,
    v_TKE: torch.Tensor | None,
    slots: torch.Tensor,
    k_SKD: torch.Tensor,
    v_SKE: torch.Tensor | None,
) -> None:
    """Copy row t to slot slots[t] (int64), converting to the cache's dtype; without values only the keys.

    Rows may be strided views with a contiguous innermost dimension. Rows that share a slot must all be padding.
    """
    num_tokens, num_heads, head_dim = k_TKD.shape
    has_value = v_TKE is not None and v_SKE is not None
    value, value_cache = (v_TKE, v_SKE) if v_TKE is not None and v_SKE is not None else (k_TKD, k_SKD)
    v_head_dim = value.shape[2]
    _store_kernel[(num_tokens,)](
        k_TKD,
        value,
        slots,
        k_SKD,
        value_cache,
        k_TKD.stride(0),
        k_TKD.stride(1),
        value.stride(0),
        value.stride(1),
        k_SKD.stride(0),
        value_cache.stride(0),
        K=num_heads,
        D=head_dim,
        E=v_head_dim,
        BLOCK_D=power_of_two_above(num_heads * head_dim),
        BLOCK_E=power_of_two_above(num_heads * v_head_dim),
        HAS_VALUE=has_value,
        num_warps=4,
    )
