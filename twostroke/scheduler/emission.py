"""Makes sampled tokens known. If an answer has a reader, the tokens that it returns become known instead."""

from __future__ import annotations

from collections.abc import Callable, Container
from collections.abc import Sequence as ListOf
from functools import partial
from typing import NamedTuple

from twostroke.request import FinishReason, SampledToken, equal_tokens
from twostroke.scheduler.reading import Reading, ReadingRunner, TokenReader
from twostroke.scheduler.sequence import Sequence
from twostroke.scheduler.values import Emission


class Drawn(NamedTuple):
    """What the sampler drew for a sequence: the token after the last known one, and one after each proposed one."""

    sequence: Sequence
    tokens: ListOf[SampledToken]
    proposed: tuple[int, ...]


class Emitted(NamedTuple):
    """The tokens of one sequence that became known. Only the last emission may end the answer."""

    sequence: Sequence
    emissions: list[Emission]
    proposed: tuple[int, ...]
    """Proposed tokens that ran after the known ones."""
    right: int
    """Number of leading proposed tokens that turned out right: their KV is that of tokens that are known now."""


new_drawn: Callable[[tuple[Sequence, ListOf[SampledToken], tuple[int, ...]]], Drawn] = partial(tuple.__new__, Drawn)
_emission: Callable[[tuple[Sequence, SampledToken, FinishReason | None]], Emission] = partial(tuple.__new__, Emission)
_emitted: Callable[[tuple[Sequence, list[Emission], tuple[int, ...], int]], Emitted] = partial(tuple.__new__, Emitted)
"""These make a tuple three times as fast as its class, whose `__new__` is written in Python."""
_ERROR = FinishReason.ERROR


class Emitter:
    """Makes drawn tokens known. An answer with a slow reader gets its tokens later, and runs in no step until then.

    A reader may make more tokens known than were drawn; these are computed in the next step.
    """

    def __init__(self, end_tokens: ListOf[int], max_model_len: int, runner: ReadingRunner) -> None:
        self._end_tokens = end_tokens
        self._max_model_len = max_model_len
        self._runner = runner
        self.late: dict[Sequence, tuple[Drawn, Reading]] = {}
        """Sequences whose next token is not known yet; some were preempted meanwhile."""

    def emit(self, drawn: ListOf[Drawn]) -> list[Emitted]:
        """Makes tokens known, up to the first wrong proposed one. Tokens of readers that are slow come later."""
        emitted = [self._plain(each) for each in drawn if each.sequence.reader is None]
        begun = [
            (each, self._reading(each, each.sequence.reader)) for each in drawn if each.sequence.reader is not None
        ]
        if not begun:
            return emitted
        self._runner.run([reading for _, reading in begun])
        for each, reading in begun:
            if reading.is_done:
                emissions = self._read(each, reading)
                equal = equal_tokens([emission.token.token for emission in emissions], each.proposed)
                emitted.append(Emitted(each.sequence, emissions, each.proposed, equal))
            else:
                self.late[each.sequence] = (each, reading)
        return emitted

    def emit_late(self, running: Container[Sequence]) -> list[Emitted]:
        """Makes the tokens known whose readers have finished since the last call.

        Proposed ones among them run again: the sequence may have lost its pages meanwhile.
        """
        emitted: list[Emitted] = []
        for sequence, (drawn, reading) in list(self.late.items()):
            if sequence.ended:
                del self.late[sequence]
            elif reading.is_done and sequence in running:
                del self.late[sequence]
                emitted.append(Emitted(sequence, self._read(drawn, reading), drawn.proposed, 0))
        return emitted

    def _plain(self, drawn: Drawn) -> Emitted:
        """Makes the drawn tokens of an answer without a reader known, up to the first wrong proposed one."""
        sequence, tokens, proposed = drawn
        if not proposed:  # as for most tokens
            token = tokens[0]
            emission = self._known(sequence, token) if token.is_sound else _emission((sequence, token, _ERROR))
            return _emitted((sequence, [emission], proposed, 0))
        emissions, emitted = list[Emission](), list[int]()
        for token in tokens:
            if equal_tokens(emitted, drawn.proposed) < len(emitted):
                break
            if not token.is_sound:
                emissions.append(Emission(sequence, token, FinishReason.ERROR))
                break
            emissions.append(self._known(sequence, token))
            emitted.append(token.token)
            if emissions[-1].finish is not None:
                break
        return Emitted(sequence, emissions, drawn.proposed, equal_tokens(emitted, drawn.proposed))

    def _read(self, drawn: Drawn, reading: Reading) -> list[Emission]:
        emissions = [self._known(drawn.sequence, token) for token in reading.tokens]
        if reading.failed is not None:
            emissions.append(Emission(drawn.sequence, reading.failed, FinishReason.ERROR))
        return emissions

    def _reading(self, drawn: Drawn, reader: TokenReader) -> Reading:
        sequence, params = drawn.sequence, drawn.sequence.sampling
        assert params is not None
        left = min(params.max_tokens - sequence.answer_tokens, self._max_model_len - len(sequence.known))
        return reader.reading(drawn.tokens, drawn.proposed, left, {*self._end_tokens, *params.stop_token_ids})

    def _known(self, sequence: Sequence, token: SampledToken) -> Emission:
        known, params, finish = sequence.known, sequence.sampling, None
        assert params is not None
        known.append(token.token)
        is_end = token.token in self._end_tokens and (not params.ignore_eos or sequence.reader is not None)
        if is_end or token.token in params.stop_token_ids:
            finish = FinishReason.STOP
        elif len(known) - sequence.prompt_tokens >= params.max_tokens or len(known) >= self._max_model_len:
            finish = FinishReason.LENGTH
        return _emission((sequence, token, finish))
