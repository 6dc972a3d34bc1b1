"""Makes sampled tokens known, and those that grammars force after them."""

from __future__ import annotations

from collections.abc import Container
from collections.abc import Sequence as ListOf
from typing import NamedTuple

from twostroke.grammar.advance import Advance, Advancer, equal_tokens
from twostroke.request import FinishReason, SampledToken
from twostroke.scheduler.sequence import Sequence
from twostroke.scheduler.values import Emission


class Drawn(NamedTuple):
    """What the sampler drew for a sequence: the token behind the last known one, and that behind each drafted one."""

    sequence: Sequence
    tokens: ListOf[SampledToken]
    drafts: tuple[int, ...]


class Emitted(NamedTuple):
    """The tokens of one sequence that became known. Only the last emission may end the answer."""

    sequence: Sequence
    emissions: list[Emission]
    drafts: tuple[int, ...]
    """Drafted tokens that ran behind the known ones."""
    equal_drafts: int
    """Those whose KV is that of tokens which are known now: leading ones."""


class Emitter:
    """Forced tokens are what the sampler would draw in steps of their own; they are computed in the next step.

    Where logprobs are asked for, each token has to be drawn: then forced ones are drafted like others, or have steps of
    their own. An answer whose grammar takes long to go on gets its tokens later, and runs in no step until then.
    """

    def __init__(self, end_tokens: ListOf[int], max_model_len: int, advancer: Advancer) -> None:
        self._end_tokens = end_tokens
        self._max_model_len = max_model_len
        self._advancer = advancer
        self._late: dict[Sequence, tuple[Drawn, Advance]] = {}
        """Running sequences, and some that were preempted meanwhile."""

    def is_late(self, sequence: Sequence) -> bool:
        """Tell whether it is not known yet what may come next in the answer."""
        return sequence in self._late

    def emit(self, drawn: ListOf[Drawn]) -> list[Emitted]:
        """Make tokens known, as far as the drafted ones before them are right and grammars go on within a moment."""
        emitted = [self._plain(each) for each in drawn if each.sequence.grammar is None]
        begun = [(each, self._advance(each)) for each in drawn if each.sequence.grammar is not None]
        if not begun:
            return emitted
        self._advancer.run([advance for _, advance in begun])
        for each, advance in begun:
            if advance.is_done:
                emissions = self._of_grammar(each, advance)
                equal = equal_tokens([emission.token.token for emission in emissions], each.drafts)
                emitted.append(Emitted(each.sequence, emissions, each.drafts, equal))
            else:
                self._late[each.sequence] = (each, advance)
        return emitted

    def emit_late(self, running: Container[Sequence]) -> list[Emitted]:
        """Make tokens known whose grammars have gone on since the last call.

        Drafted ones among them run again: the sequence may have lost its pages meanwhile.
        """
        emitted: list[Emitted] = []
        for sequence, (drawn, advance) in list(self._late.items()):
            if sequence.ended:
                del self._late[sequence]
            elif advance.is_done and sequence in running:
                del self._late[sequence]
                emitted.append(Emitted(sequence, self._of_grammar(drawn, advance), drawn.drafts, 0))
        return emitted

    def _plain(self, drawn: Drawn) -> Emitted:
        """Make tokens of an answer without a grammar known."""
        sequence, emissions, emitted = drawn.sequence, list[Emission](), list[int]()
        for token in drawn.tokens:
            if equal_tokens(emitted, drawn.drafts) < len(emitted):
                break
            if not token.is_sound:
                emissions.append(Emission(sequence, token, FinishReason.ERROR))
                break
            emissions.append(self._known(sequence, token))
            emitted.append(token.token)
            if emissions[-1].finish is not None:
                break
        return Emitted(sequence, emissions, drawn.drafts, equal_tokens(emitted, drawn.drafts))

    def _of_grammar(self, drawn: Drawn, advance: Advance) -> list[Emission]:
        emissions = [self._known(drawn.sequence, token) for token in advance.tokens]
        if advance.failed is not None:
            emissions.append(Emission(drawn.sequence, advance.failed, FinishReason.ERROR))
        return emissions

    def _advance(self, drawn: Drawn) -> Advance:
        grammar, params = drawn.sequence.grammar, drawn.sequence.sampling
        assert grammar is not None
        assert params is not None
        left = min(params.max_tokens - drawn.sequence.answer_tokens, self._max_model_len - len(drawn.sequence.known))
        ends = {*self._end_tokens, *params.stop_token_ids}
        return Advance(grammar, drawn.tokens, drawn.drafts, left, params.logprobs is None, ends)

    def _known(self, sequence: Sequence, token: SampledToken) -> Emission:
        known, params, finish = sequence.known, sequence.sampling, None
        assert params is not None
        known.append(token.token)
        is_end = token.token in self._end_tokens and (not params.ignore_eos or sequence.grammar is not None)
        if is_end or token.token in params.stop_token_ids:
            finish = FinishReason.STOP
        elif len(known) - sequence.prompt_tokens >= params.max_tokens or len(known) >= self._max_model_len:
            finish = FinishReason.LENGTH
        return Emission(sequence, token, finish)
