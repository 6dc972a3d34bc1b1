"""Computes logprobs of prompts from the logits of each of their tokens. It is a pure function, on any device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from twostroke.request import PromptLogprobs
from twostroke.scheduler.batch import ScoreRow

ROWS_AT_ONCE = 16
"""Rows that are computed together. Besides its logits, a row needs four times their memory."""
ID_STEP = 2.0**-45
"""Weight that puts the lower id first among equal logprobs. At most one logprob of a row is above -0.69, so two
different ones differ by at least 2^-24. Ids below 2^20, times this weight, stay below that."""


def score_prompts(logits: torch.Tensor, rows: Sequence[ScoreRow]) -> tuple[PromptLogprobs, ...]:
    """Returns the logprobs of the targets of each row.

    `logits`: [targets of all rows, vocab]. The result of a row does not depend on the other rows.
    """
    parts, begin = [], 0
    for row in rows:
        end = begin + len(row.targets)
        parts.append(_scored(logits[begin:end], row))
        begin = end
    return tuple(parts)


def _scored(logits: torch.Tensor, row: ScoreRow) -> PromptLogprobs:
    targets = torch.tensor(row.targets, device=logits.device)
    pieces = [slice(begin, begin + ROWS_AT_ONCE) for begin in range(0, len(targets), ROWS_AT_ONCE)]
    return PromptLogprobs.joined(_piece(logits[piece].float(), targets[piece], row.top) for piece in pieces)


def _piece(logits: torch.Tensor, targets: torch.Tensor, top: int) -> PromptLogprobs:
    logprobs = logits.log_softmax(dim=-1)
    chosen = logprobs.gather(1, targets[:, None])
    places = (logprobs > chosen).sum(dim=-1) + 1
    ids = _likeliest(logprobs, top)
    tops = logprobs.gather(1, ids)
    return PromptLogprobs.of(chosen[:, 0].tolist(), places.tolist(), ids.flatten().tolist(), tops.flatten().tolist())


def _likeliest(logprobs: torch.Tensor, count: int) -> torch.Tensor:
    """Returns the ids of the greatest logprobs of each row [rows, count], greatest first, of equal ones the lowest."""
    if count == 0:
        return torch.empty(len(logprobs), 0, dtype=torch.int64, device=logprobs.device)
    steps = torch.arange(logprobs.shape[1], dtype=torch.float64, device=logprobs.device) * ID_STEP
    return (logprobs.double() - steps).topk(min(count, logprobs.shape[1])).indices
