"""From logits to tokens, row by row: a pure function of (logits, seed, choice, position), never of the batch around it.

Order per row: bias, penalties, bans -> logprobs -> grammar, allowed tokens -> temperature, min-p, top-k, top-p -> draw.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from twostroke.base.token_mask import candidates
from twostroke.engine.sampling.noise import gumbel
from twostroke.request import SampledToken, SamplingParams
from twostroke.scheduler.batch import SampleRow

GREEDY_BELOW = 1e-5
"""A temperature under this is greedy: dividing by it would overflow float32 long before it changed a draw."""

Values = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]


UNSOUND = SampledToken(0, is_sound=False)
"""The result of a row whose greatest logit is infinite or NaN (NaN counts as the greatest), or whose grammar has
failed."""


def sample(logits: torch.Tensor, rows: Sequence[SampleRow]) -> tuple[SampledToken, ...]:
    """Returns one token per row of logits [rows, vocab]. A row with NaN or infinities changes nothing in the others."""
    logits = logits.float()
    likeliest_ids, are_sound = _likeliest_of_each(logits)
    return tuple(
        UNSOUND
        if not are_sound[index]
        else SampledToken(likeliest_ids[index])
        if is_plain_greedy(row)
        else _sample_row(logits[index], row)
        for index, row in enumerate(rows)
    )


def _likeliest_of_each(logits: torch.Tensor) -> tuple[list[int], list[bool]]:
    """Returns the likeliest id of each row, and whether its logit is finite. If so, the row has no NaN or positive
    infinity.

    The lowest id wins ties. It uses numpy, which is ten times faster on the host than torch.
    """
    values: Values = logits.numpy(force=True)
    ids = values.argmax(axis=-1)
    return ids.tolist(), np.isfinite(values[np.arange(len(values)), ids]).tolist()


def is_greedy(params: SamplingParams) -> bool:
    return params.temperature < GREEDY_BELOW


def is_plain_greedy(row: SampleRow) -> bool:
    """Returns whether the row needs only the token with the greatest logit."""
    return row.mask is None and is_greedy(row.params) and is_unadjusted(row)


def is_unadjusted(row: SampleRow) -> bool:
    """Returns whether the row needs only a token, drawn from unchanged logits of all tokens or of those that a grammar
    permits."""
    params = row.params
    is_adjusted = params.logit_bias or params.has_penalties or (row.banned and row.mask is None)
    return not is_adjusted and params.logprobs is None


def _sample_row(logits: torch.Tensor, row: SampleRow) -> SampledToken:
    params = row.params
    logits = _adjusted(logits, row)
    ids = None if row.mask is None else candidates(row.mask, len(logits), row.banned)
    if ids is not None and len(ids) == 0:  # the grammar failed
        return UNSOUND
    if ids is not None and len(ids) == 1:
        token, value = int(ids[0]), 0.0  # certain, whatever its logit and the noise
    else:
        values = logits if ids is None else logits[torch.from_numpy(ids)]
        index, value = _greatest(values) if is_greedy(params) else _draw(values / params.temperature, row, ids)
        token = index if ids is None else int(ids[index])
    if not math.isfinite(value):  # adjusting and dividing may have overflown, or every token is banned
        return UNSOUND
    if params.logprobs is None:
        return SampledToken(token)
    logprobs = logits.log_softmax(dim=-1).numpy(force=True)
    named = params.logprob_token_ids
    top = tuple([(other, float(logprobs[other])) for other in named]) if named else _top(logprobs, params.logprobs)
    return SampledToken(token, float(logprobs[token]), top)


def _top(logprobs: Values, count: int) -> tuple[tuple[int, float], ...]:
    """Returns the likeliest tokens and their logprobs, the likeliest first. Among equals the lowest id is first, so
    that no library decides on their order."""
    if count == 0:
        return ()
    ids = likeliest(logprobs, min(count, len(logprobs)))
    ids = ids[np.lexsort((ids, -logprobs[ids]))]
    return tuple(zip(ids.tolist(), logprobs[ids].tolist(), strict=True))


def _adjusted(logits: torch.Tensor, row: SampleRow) -> torch.Tensor:
    """Returns the logits with bias, penalties and bans applied: a copy where there are any."""
    params, bans = row.params, row.banned if row.mask is None else ()
    if not (params.logit_bias or params.has_penalties or bans):
        return logits
    logits = logits.clone()
    if params.logit_bias:
        ids, biases = zip(*params.logit_bias, strict=True)
        logits.index_add_(0, _tensor(ids), torch.tensor(biases, dtype=torch.float32))
    if params.has_penalties:
        _penalise(logits, row)
    if bans:
        logits[_tensor(bans)] = -math.inf
    return logits


def _penalise(logits: torch.Tensor, row: SampleRow) -> None:
    """Applies penalties: repetition over prompt and answer, frequency and presence only over the answer, as in OpenAI's
    API.
    """
    params = row.params
    if params.repetition_penalty != 1:
        seen = _tensor(sorted({*row.prompt, *row.output}))
        values = logits[seen]
        penalty = params.repetition_penalty
        logits[seen] = torch.where(values > 0, values / penalty, values * penalty)
    if row.output:
        counts = Counter(row.output)
        penalties = [params.frequency_penalty * count + params.presence_penalty for count in counts.values()]
        logits[_tensor(list(counts))] -= torch.tensor(penalties, dtype=torch.float32)


def _greatest(values: torch.Tensor) -> tuple[int, float]:
    index = int(values.argmax())
    return index, float(values[index])


def _draw(scaled: torch.Tensor, row: SampleRow, ids: Ids | None) -> tuple[int, float]:
    """Draws by Gumbel-max among the tokens that truncation leaves. Noise is only computed for those.

    `ids` are those of `scaled`, None for a whole vocabulary. Returns an index into `scaled`, with its noisy value.
    """
    params = row.params
    kept = truncated(scaled.numpy(force=True), params)
    if len(kept) == 1:  # certain, even where its noise is minus infinity
        return int(kept[0]), float(scaled[kept[0]])
    tokens = torch.from_numpy(kept if ids is None else ids[kept])
    noise = gumbel(params.seed, params.choice, row.position, tokens)
    index, value = _greatest(scaled[torch.from_numpy(kept)] + noise)
    return int(kept[index]), value


def truncated(scaled: Values, params: SamplingParams) -> Ids:
    """Returns the ids that survive min-p, then top-k, then top-p. numpy: it sorts a vocabulary 30 times faster than
    torch.
    """
    kept: Ids = np.arange(len(scaled))
    if params.min_p > 0:
        kept = np.flatnonzero(scaled >= scaled.max() + math.log(params.min_p))
    if params.top_k is not None and params.top_k < len(kept):
        kept = kept[likeliest(scaled[kept], params.top_k)]
    if params.top_p < 1:
        kept = kept[_nucleus(scaled[kept], params.top_p)]
    return kept


def likeliest(values: Values, count: int) -> Ids:
    """Returns the indices of the `count` greatest values; among equals at the edge, the lowest indices."""
    edge = len(values) - count
    least = np.partition(values, edge)[edge]
    above, equal = np.flatnonzero(values > least), np.flatnonzero(values == least)
    return np.concatenate((above, equal[: count - len(above)]))


def _nucleus(values: Values, top_p: float) -> Ids:
    """Returns the indices of the fewest greatest values whose share of the probability reaches `top_p`."""
    descending = np.sort(values)[::-1]
    mass = np.exp(descending - descending[0]).cumsum(dtype=np.float64)
    count = int(np.searchsorted(mass, top_p * mass[-1])) + 1
    return likeliest(values, min(count, len(values)))


def _tensor(ids: Sequence[int]) -> torch.Tensor:
    return torch.tensor(ids, dtype=torch.int64)
