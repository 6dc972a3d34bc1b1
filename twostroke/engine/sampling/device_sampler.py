"""Draws from logits that lie on a device: it proposes a few tokens of each row, and the host decides among them.

The host's decision is the sampler's, number for number: it computes noise and truncation for the few. The device may
only leave out tokens that cannot win, by a margin far above the rounding differences of its arithmetic. Rows where that
is uncertain are left to the sampler.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch

from twostroke.base.token_mask import WORD_BITS
from twostroke.engine.sampling.noise import gumbel, gumbel_rows, stream_of
from twostroke.engine.sampling.sampler import Ids, Values, is_greedy, likeliest, truncated
from twostroke.request import SampledToken, SamplingParams
from twostroke.scheduler.batch import SampleRow

WITH_NOISE = 16
"""Number of tokens that the device proposes if nothing is truncated: the greatest after noise."""
WITHOUT_NOISE = 512
"""Number of tokens that the device proposes if truncation comes first: the likeliest."""
NOISE_MARGIN = 1e-4
"""Margin as a share of a value: a device's noisy values differ from the host's by 1e-6 of it at most."""
MASS_MARGIN = 1e-6
"""The margin as a share of the whole probability: sums of a device's exponentials differ from the host's by a tenth of
it."""


def draw_rows(logits: torch.Tensor, rows: Sequence[SampleRow]) -> list[SampledToken | None]:
    """Returns one token per row of logits [rows, vocab], None for a row that the sampler must decide. All rows are
    unadjusted (`is_unadjusted`)."""
    logits = _permitted(logits.float(), rows)
    drawn: list[SampledToken | None] = [None] * len(rows)
    for draw in (_take_greatest, _draw_with_noise, _draw_truncated):
        indices = [index for index, row in enumerate(rows) if _draw_of(row.params) is draw]
        if indices:
            tokens = draw(logits[indices], [rows[index] for index in indices])
            for index, token in zip(indices, tokens, strict=True):
                drawn[index] = None if token is None else SampledToken(token)
    return drawn


_Draw = Callable[[torch.Tensor, Sequence[SampleRow]], list[int | None]]


def _draw_of(params: SamplingParams) -> _Draw:
    if is_greedy(params):
        return _take_greatest
    return _draw_truncated if _is_truncated(params) else _draw_with_noise


def _is_truncated(params: SamplingParams) -> bool:
    return params.min_p > 0 or params.top_k is not None or params.top_p < 1


def _permitted(logits: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
    """Returns the logits, minus infinity where a row's grammar does not permit a token or the token is banned.

    A row without any permitted token is left to the sampler, which handles failed grammars.
    """
    if all(row.mask is None for row in rows):
        return logits
    vocab = logits.shape[1]
    masks = np.full((len(rows), -(-vocab // WORD_BITS)), 0xFFFFFFFF, np.uint32)
    for mask, row in zip(masks, rows, strict=True):
        if row.mask is not None:
            mask[:] = 0
            mask[: len(row.mask)] = row.mask[: len(mask)]
            for token in row.banned:
                mask[token // WORD_BITS] &= ~np.uint32(1 << token % WORD_BITS)
    words = torch.from_numpy(masks.view(np.int32)).to(logits.device)
    bits = words[:, :, None] >> torch.arange(WORD_BITS, dtype=torch.int32, device=logits.device) & 1
    return logits.masked_fill(bits.view(len(rows), -1)[:, :vocab] == 0, -math.inf)


def _take_greatest(logits: torch.Tensor, _rows: Sequence[SampleRow]) -> list[int | None]:
    greatest, ids = logits.max(dim=-1)
    both = zip(greatest.tolist(), ids.tolist(), strict=True)
    return [token if math.isfinite(value) else None for value, token in both]


def _draw_with_noise(logits: torch.Tensor, rows: Sequence[SampleRow]) -> list[int | None]:
    vocab = logits.shape[1]
    streams = [stream_of(row.params.seed, row.params.choice, row.position) for row in rows]
    noisy = _scaled(logits, rows) + gumbel_rows(torch.tensor(streams, device=logits.device), vocab)
    best, ids = noisy.topk(min(WITH_NOISE, vocab))
    proposed = logits.gather(1, ids).cpu()
    best, ids = best.cpu(), ids.cpu()
    tokens: list[int | None] = []
    for index, row in enumerate(rows):
        first, last = float(best[index, 0]), float(best[index, -1])
        is_sure = best.shape[1] == vocab or last < first - NOISE_MARGIN * max(1.0, abs(first))
        is_sure &= math.isfinite(first)
        tokens.append(_decide(*_by_id(ids[index], proposed[index]), row, None) if is_sure else None)
    return tokens


def _draw_truncated(logits: torch.Tensor, rows: Sequence[SampleRow]) -> list[int | None]:
    vocab = logits.shape[1]
    scaled = _scaled(logits, rows)
    masses = (scaled - scaled.amax(-1, keepdim=True)).exp().sum(-1, dtype=torch.float64).tolist()
    proposed, ids = (tensor.cpu() for tensor in logits.topk(min(WITHOUT_NOISE, vocab)))
    tokens: list[int | None] = []
    for index, row in enumerate(rows):
        row_ids, row_logits = _by_id(ids[index], proposed[index])
        may_come = row_logits > -math.inf
        is_whole = len(row_ids) == vocab or not may_come.all()
        row_ids, row_logits = row_ids[may_come], row_logits[may_come]
        if not len(row_ids):
            tokens.append(None)
            continue
        values: Values = (row_logits / row.params.temperature).numpy()
        kept = truncated(values, row.params) if is_whole else _kept(values, row.params, masses[index])
        tokens.append(None if kept is None else _decide(row_ids, row_logits, row, kept))
    return tokens


def _scaled(logits: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
    # By a tensor: by a number, CUDA would multiply with its reciprocal.
    return logits / torch.tensor([[row.params.temperature] for row in rows], device=logits.device)


def _by_id(ids: torch.Tensor, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns values and ids in the sampler's order."""
    ids, order = ids.sort()
    return ids, logits[order]


def _decide(ids: torch.Tensor, logits: torch.Tensor, row: SampleRow, kept: Ids | None) -> int:
    """Returns the sampler's draw among some ids."""
    if kept is not None:
        ids, logits = ids[kept], logits[kept]
    params = row.params
    noise = gumbel(params.seed, params.choice, row.position, ids)
    return int(ids[(logits / params.temperature + noise).argmax()])


def _kept(values: Values, params: SamplingParams, mass: float) -> Ids | None:
    """Returns what truncation of the whole row keeps, as indices of its likeliest values; None where they
    are too few.
    """
    least = values.min()
    if params.min_p > 0 and least < values.max() + math.log(params.min_p):
        return truncated(values, params)
    if params.top_k is not None and params.top_k < len(values):
        edge = np.partition(values, -params.top_k)[-params.top_k]
        return truncated(values, params) if edge > least else None
    if params.min_p > 0 or params.top_k is not None:
        return None
    return _nucleus(values, params.top_p, mass)


def _nucleus(values: Values, top_p: float, mass: float) -> Ids | None:
    descending = np.sort(values)[::-1]
    masses = np.exp(descending - descending[0]).cumsum(dtype=np.float64)
    wanted = top_p * mass
    count = int(np.searchsorted(masses, wanted)) + 1
    if count >= len(values) or descending[count - 1] == descending[-1]:
        return None
    is_sure = np.abs(masses[max(0, count - 2) : count] - wanted).min() > MASS_MARGIN * mass
    return likeliest(values, count) if is_sure else None
