"""Choosing tokens from logits, one independent decision a row.

A row's token depends on its logits and its own parameters only: the random number of a sampled row is a hash of the
request's seed and the output position, so the same request samples the same tokens whatever else is in the batch and on
whichever rank or topology it runs.

Shape letters: B rows, V vocabulary, K candidates kept.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

GREEDY_TEMPERATURE = 1e-5
# A nucleus is nearly always inside so many candidates; where it is not, the whole row is sorted.
_CANDIDATES = 1024
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
    greedy_B = logits_BV.argmax(-1)
    # argmax lands on a NaN if the row has one, so looking at the one value checks the row.
    valid_B = logits_BV.gather(1, greedy_B[:, None]).squeeze(1).isfinite()
    plain = [i for i, row in enumerate(rows) if not row.is_greedy and not row.is_filtered]
    filtered = [i for i, row in enumerate(rows) if not row.is_greedy and row.is_filtered]
    if not plain and not filtered:
        return greedy_B, valid_B
    tokens_B = greedy_B.clone()
    for indices, choose in ((plain, _sample_plain), (filtered, _sample_filtered)):
        if not indices:
            continue
        index = torch.tensor(indices, device=logits_BV.device)
        chosen = [rows[i] for i in indices]
        logits = logits_BV[index] / _column([row.temperature for row in chosen], logits_BV)
        # A NaN row would send the searches below out of range; it is reported through `valid_B` anyway.
        probs = torch.where(valid_B[index, None], logits.softmax(-1), 1.0 / logits.shape[-1])
        tokens_B[index] = choose(probs, chosen)
    return tokens_B, valid_B


def _column(values: list[float], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32, device=like.device)[:, None]


def _pick(mass_BK: torch.Tensor, uniforms: list[float]) -> torch.Tensor:
    """[B, 1] index of the first candidate whose cumulative mass exceeds uniform * total; zero-mass ones are passed."""
    cumulative_BK = mass_BK.double().cumsum(-1)
    u_B1 = torch.tensor(uniforms, dtype=torch.float64, device=mass_BK.device)[:, None]
    target_B1 = u_B1 * cumulative_BK[:, -1:]
    index_B1 = torch.searchsorted(cumulative_BK, target_B1, right=True)
    # uniform < 1, but rounding may put the target at the total: then take the last candidate that has mass.
    last_B1 = torch.searchsorted(cumulative_BK, cumulative_BK[:, -1:].contiguous())
    return torch.minimum(index_B1, last_B1)


def _sample_plain(probs_BV: torch.Tensor, rows: list[RowSampling]) -> torch.Tensor:
    return _pick(probs_BV, [row.uniform for row in rows]).squeeze(1)


def _sample_filtered(probs_BV: torch.Tensor, rows: list[RowSampling]) -> torch.Tensor:
    """top-k, then top-p on the unrenormalised mass (the smallest set reaching it), then min-p against the likeliest."""
    vocab = probs_BV.shape[-1]
    top_k = [row.top_k if row.top_k > 0 else vocab for row in rows]
    width = min(vocab, max(_CANDIDATES, max(k for k in [1, *(k for k in top_k if k < vocab)])))
    mass_BK, ids_BK = probs_BV.topk(width, dim=-1)
    top_p = _column([row.top_p for row in rows], probs_BV)
    if width < vocab:
        unbounded = torch.tensor([k > width for k in top_k], device=probs_BV.device)
        # min-p also ends a row inside the candidates once the last of them is below its bound.
        min_p_open = mass_BK[:, -1] >= torch.tensor([row.min_p for row in rows], device=probs_BV.device) * mass_BK[:, 0]
        if bool((unbounded & min_p_open & (mass_BK.sum(-1) < top_p[:, 0])).any()):
            mass_BK, ids_BK = probs_BV.sort(dim=-1, descending=True, stable=True)
    rank_K = torch.arange(mass_BK.shape[-1], device=probs_BV.device)
    before_BK = mass_BK.cumsum(-1) - mass_BK
    keep = rank_K < _column([float(k) for k in top_k], probs_BV)
    keep &= before_BK < top_p
    keep &= mass_BK >= _column([row.min_p for row in rows], probs_BV) * mass_BK[:, :1]
    keep[:, 0] = True
    index = _pick(torch.where(keep, mass_BK, 0.0), [row.uniform for row in rows])
    return ids_BK.gather(1, index).squeeze(1)


def token_logprobs(
    logits_BV: torch.Tensor, tokens_B: torch.Tensor, top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log probabilities under the model's own distribution (before temperature, filters and masks).

    Returns (chosen [B] float32, top values [B, top] float32, top ids [B, top] int64), likeliest first.
    """
    logprobs_BV = logits_BV.log_softmax(-1)
    chosen_B = logprobs_BV.gather(1, tokens_B[:, None]).squeeze(1)
    values, ids = logprobs_BV.topk(min(top, logits_BV.shape[-1]), dim=-1)
    return chosen_B, values, ids
