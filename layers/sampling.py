"""Choosing tokens from logits, one independent decision a row.

A row's token depends on its logits and its own parameters only: the random number of a sampled row is a hash of the
request's seed and the output position, so the same request samples the same tokens whatever else is in the batch and on
whichever rank or topology it runs.

Shape letters: B rows, V vocabulary, K candidates, G blocks of the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from layers.kernels import cpu
from layers.transfer import to_device

GREEDY_TEMPERATURE = 1e-5
# A nucleus is nearly always inside so many candidates; where it is not, the whole row is sorted.
_CANDIDATES = 1024
# Vocabulary entries summed together before the cumulative sum.
_BLOCK = 256
_MASK64 = (1 << 64) - 1


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) from (seed, position): two rounds of the splitmix64 finaliser (Steele et al., 2014)."""
    x = (seed * 0x9E3779B97F4A7C15 + position + 1) & _MASK64
    for _ in range(2):
        x = (x + 0x9E3779B97F4A7C15) & _MASK64
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
        x ^= x >> 31
    return (x >> 11) / (1 << 53)


@dataclass(frozen=True)
class RowSampling:
    """One row's parameters; top_k -1 means all. uniform: its random number, see `uniform`."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    uniform: float

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_TEMPERATURE or self.top_k == 1

    @property
    def is_filtered(self) -> bool:
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0


def sample(logits_BV: torch.Tensor, rows: list[RowSampling]) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens [B] int64, valid [B] bool); `valid` is False where a row's logits hold NaN or no finite maximum.

    logits_BV float32. No host synchronisation on the way unless a nucleus is wider than 1024 candidates.
    """
    if logits_BV.is_cuda:
        return _sample_cuda(logits_BV, rows)
    greedy_B, valid_B = _argmax(logits_BV)
    plain = [i for i, row in enumerate(rows) if not row.is_greedy and not row.is_filtered]
    filtered = [i for i, row in enumerate(rows) if not row.is_greedy and row.is_filtered]
    if not plain and not filtered:
        return greedy_B, valid_B
    tokens_B = greedy_B.clone()
    for indices, choose in ((plain, _sample_plain), (filtered, _sample_filtered)):
        if not indices:
            continue
        chosen = [rows[i] for i in indices]
        temperature_B1 = _column([row.temperature for row in chosen], logits_BV)
        if len(indices) == len(rows):
            return choose(logits_BV / temperature_B1, chosen), valid_B
        index = to_device(indices, torch.int64, logits_BV.device)
        tokens_B[index] = choose(logits_BV[index] / temperature_B1, chosen)
    return tokens_B, valid_B


def _argmax(logits_BV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(index of the largest logit [B] int64, whether it is finite [B] bool).

    argmax lands on a NaN if the row has one, so looking at the one value checks the row.
    """
    if cpu.usable(logits_BV):
        return cpu.argmax(logits_BV)
    greedy_B = logits_BV.argmax(-1)
    return greedy_B, logits_BV.gather(1, greedy_B[:, None]).squeeze(1).isfinite()


def _sample_cuda(logits_BV: torch.Tensor, rows: list[RowSampling]) -> tuple[torch.Tensor, torch.Tensor]:
    """Everything but filtered rows in our own kernels."""
    from layers.kernels.triton_sampling import sample_unfiltered

    params = [(0.0 if row.is_greedy else row.temperature, row.uniform) for row in rows]
    params_B2 = to_device(params, torch.float64, logits_BV.device)
    tokens_B, valid_B = sample_unfiltered(logits_BV, params_B2, GREEDY_TEMPERATURE)
    filtered = [i for i, row in enumerate(rows) if not row.is_greedy and row.is_filtered]
    if filtered:
        index = to_device(filtered, torch.int64, logits_BV.device)
        chosen = [rows[i] for i in filtered]
        scaled_BV = logits_BV[index] / _column([row.temperature for row in chosen], logits_BV)
        tokens_B[index] = _sample_filtered(scaled_BV, chosen)
    return tokens_B, valid_B


def _column(values: list[float], like: torch.Tensor) -> torch.Tensor:
    return to_device(values, torch.float32, like.device)[:, None]


def _pick(mass_BK: torch.Tensor, target_B1: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(index, before), both [B, 1]: the first candidate whose cumulative mass exceeds the target, and the mass before.

    Candidates without mass are passed; a target at or above the total takes the last candidate that has mass. A NaN row
    gives some index in range, which its `valid` flag tells the caller to ignore.
    """
    cumulative_BK = mass_BK.double().cumsum(-1)
    index_B1 = torch.searchsorted(cumulative_BK, target_B1, right=True)
    last_B1 = torch.searchsorted(cumulative_BK, cumulative_BK[:, -1:].contiguous())
    index_B1 = torch.minimum(index_B1, last_B1).clamp(max=mass_BK.shape[-1] - 1)
    before_B1 = cumulative_BK.gather(1, index_B1) - mass_BK.gather(1, index_B1).double()
    return index_B1, before_B1


def _uniforms(rows: list[RowSampling], like: torch.Tensor) -> torch.Tensor:
    return to_device([row.uniform for row in rows], torch.float64, like.device)[:, None]


def _sample_plain(scaled_BV: torch.Tensor, rows: list[RowSampling]) -> torch.Tensor:
    """Inverse of the cumulative distribution in vocabulary order: first the block, then the token in it, so that only
    block sums and one block a row are accumulated."""
    batch, vocab = scaled_BV.shape
    mass_BV = (scaled_BV - scaled_BV.amax(-1, keepdim=True)).exp_()
    blocks = -(-vocab // _BLOCK)
    if blocks * _BLOCK != vocab:
        mass_BV = torch.nn.functional.pad(mass_BV, (0, blocks * _BLOCK - vocab))
    mass_BGK = mass_BV.view(batch, blocks, _BLOCK)
    sums_BG = mass_BGK.sum(-1)
    target_B1 = _uniforms(rows, scaled_BV) * sums_BG.double().sum(-1, keepdim=True)
    block_B1, before_B1 = _pick(sums_BG, target_B1)
    block_BK = mass_BGK.gather(1, block_B1[..., None].expand(-1, -1, _BLOCK)).squeeze(1)
    index_B1, _ = _pick(block_BK, target_B1 - before_B1)
    return (block_B1 * _BLOCK + index_B1).squeeze(1).clamp(max=vocab - 1)


def _sample_filtered(scaled_BV: torch.Tensor, rows: list[RowSampling]) -> torch.Tensor:
    """top-k, then top-p on the unrenormalised mass (the smallest set reaching it), then min-p against the likeliest."""
    vocab = scaled_BV.shape[-1]
    top_k = [row.top_k if 0 < row.top_k < vocab else vocab for row in rows]
    width = min(vocab, max(k if k < vocab else _CANDIDATES for k in top_k))
    total_B1 = scaled_BV.logsumexp(-1, keepdim=True)
    logit_BK, ids_BK = scaled_BV.topk(width, dim=-1)
    mass_BK = (logit_BK - total_B1).exp()
    top_p_B1 = _column([row.top_p for row in rows], scaled_BV)
    min_p_B1 = _column([row.min_p for row in rows], scaled_BV)
    if width < vocab:
        # The candidates are too few for a row that no filter has ended by the last of them.
        open_B = to_device([k > width for k in top_k], torch.bool, scaled_BV.device)
        open_B &= (mass_BK[:, -1:] >= min_p_B1 * mass_BK[:, :1]).squeeze(1)
        open_B &= mass_BK.sum(-1) < top_p_B1.squeeze(1)
        if bool(open_B.any()):
            logit_BK, ids_BK = scaled_BV.sort(dim=-1, descending=True, stable=True)
            mass_BK = (logit_BK - total_B1).exp()
    rank_K = torch.arange(mass_BK.shape[-1], device=scaled_BV.device)
    keep_BK = rank_K < _column([float(k) for k in top_k], scaled_BV)
    keep_BK &= mass_BK.cumsum(-1) - mass_BK < top_p_B1
    keep_BK &= mass_BK >= min_p_B1 * mass_BK[:, :1]
    keep_BK[:, 0] = True
    kept_BK = torch.where(keep_BK, mass_BK, 0.0)
    index_B1, _ = _pick(kept_BK, _uniforms(rows, scaled_BV) * kept_BK.double().sum(-1, keepdim=True))
    return ids_BK.gather(1, index_B1).squeeze(1)


def token_logprobs(
    logits_BV: torch.Tensor, tokens_B: torch.Tensor, top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log probabilities under the model's own distribution (before logits processors, temperature and filters).

    Returns (chosen [B] float32, top values [B, top] float32, top ids [B, top] int64), likeliest first.
    """
    logprobs_BV = logits_BV.log_softmax(-1)
    chosen_B = logprobs_BV.gather(1, tokens_B[:, None]).squeeze(1)
    values, ids = logprobs_BV.topk(min(top, logits_BV.shape[-1]), dim=-1)
    return chosen_B, values, ids
