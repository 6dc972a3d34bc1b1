"""Makes sampled tokens known, and those that grammars force after them."""

from __future__ import annotations

from collections.abc import Sequence as ListOf

from twostroke.request import FinishReason, SampledToken, plain_token
from twostroke.scheduler.sequence import Sequence
from twostroke.scheduler.values import Emission


def emissions_of(
    sequence: Sequence,
    drawn: ListOf[SampledToken],
    drafts: ListOf[int],
    end_tokens: ListOf[int],
    max_model_len: int,
) -> list[Emission]:
    """Make tokens known that were drawn behind the last known one, and behind each of `drafts` while those are right.

    Only the last emission may end the answer.
    """
    known, emissions, emitted = len(sequence.known), list[Emission](), 0
    while emitted < len(drawn) and equal_tokens(sequence.known[known:], drafts) == emitted:
        token = drawn[emitted]
        if not token.is_sound:
            return [*emissions, Emission(sequence, token, FinishReason.ERROR)]
        emissions += _with_forced(sequence, token, end_tokens, max_model_len)
        if emissions[-1].finish is not None:
            break
        emitted = len(sequence.known) - known
    return emissions


def equal_tokens(emitted: ListOf[int], drafts: ListOf[int]) -> int:
    """Return how many leading tokens of the two are equal."""
    pairs = enumerate(zip(emitted, drafts, strict=False))
    return next((rank for rank, (token, draft) in pairs if token != draft), min(len(emitted), len(drafts)))


def _with_forced(
    sequence: Sequence, token: SampledToken, end_tokens: ListOf[int], max_model_len: int
) -> list[Emission]:
    """Make a sampled token known, and those that the answer's grammar forces after it; only the last may end it.

    Forced tokens are what the sampler would draw in steps of their own; they are computed in the next step. Where
    logprobs are asked for, each token needs its own step.
    """
    grammar, params = sequence.grammar, sequence.sampling
    assert params is not None
    emissions = [_emission(sequence, token, end_tokens, max_model_len)]
    if grammar is None:
        return emissions
    while emissions[-1].finish is None:
        grammar.consume(sequence.known[-1])
        if grammar.failure is not None:
            return [*emissions, Emission(sequence, token, FinishReason.ERROR)]
        forced = grammar.take_forced() if params.logprobs is None else None
        if forced is None:
            break
        emissions.append(_emission(sequence, plain_token(forced), end_tokens, max_model_len))
    return emissions


def _emission(sequence: Sequence, token: SampledToken, end_tokens: ListOf[int], max_model_len: int) -> Emission:
    known, params, finish = sequence.known, sequence.sampling, None
    assert params is not None
    known.append(token.token)
    is_end = token.token in end_tokens and (not params.ignore_eos or sequence.grammar is not None)
    if is_end or token.token in params.stop_token_ids:
        finish = FinishReason.STOP
    elif len(known) - sequence.prompt_tokens >= params.max_tokens or len(known) >= max_model_len:
        finish = FinishReason.LENGTH
    return Emission(sequence, token, finish)
