"""Makes sampled tokens known, and those that grammars force after them."""

from __future__ import annotations

from collections.abc import Sequence as ListOf

from twostroke.request import FinishReason, SampledToken, plain_token
from twostroke.scheduler.sequence import Sequence
from twostroke.scheduler.values import Emission


def emissions_of(
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
