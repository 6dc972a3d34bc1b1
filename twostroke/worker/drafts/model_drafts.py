"""The draft model of a decode worker: it computes what it lacks of each answer, and draws tokens before a step.

It runs on the engine thread, between the steps of the model. The draft model claims pages for an answer when it begins
to catch up with it. It frees them when the answer ends or leaves this worker. An answer for which there are no pages
continues without drafts. If the draft model fails, it stays off until the worker starts again, and no request fails.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from twostroke.base.errors import EngineLost
from twostroke.base.ids import PageId
from twostroke.engine.drafts.engine import Drafted, DraftEngine
from twostroke.engine.loop import EngineThread
from twostroke.request import SamplingParams
from twostroke.scheduler.batch import MOST_EXTRA_LOGITS, Batch, StepResult
from twostroke.scheduler.constraints.draft_rows import DraftRow, draft_params
from twostroke.scheduler.constraints.drafting import most_drafted, speculation_of
from twostroke.scheduler.constraints.model_drafting import DraftCandidate, model_lengths, pays_catching_up
from twostroke.scheduler.cost import StepCost, StepTerms
from twostroke.scheduler.scheduler import Scheduler
from twostroke.scheduler.sequence import Sequence
from twostroke.scheduler.values import SchedulerLimits
from twostroke.speculation.drafters import ModelDrafter
from twostroke.speculation.speculation import MOST_DRAFTED, Speculation
from twostroke.worker.measured.rates import Rates

log = logging.getLogger(__name__)

MOST_LACKING = 16
"""Most tokens that the draft model may lack when it drafts: it computes them with the first drafted one. If it lacks
more, it first catches up in chunks."""
CATCH_UP_SHARE = 0.5
"""Most time of catching up, as a fraction of the streams' step: all streams wait for it."""
IDLE_TOKENS = 64
"""Most tokens of one catch-up while no stream runs: a prompt whose pages arrive meanwhile has to wait."""
LEAST_TOKENS = 16
"""Fewest tokens of one catch-up: fewer would take hardly less time."""
TRIED_STEPS = 64
"""After this many steps of streams without a drafted token the draft model draws some, whatever its known cost. Its
cost is known only from its own steps. The first of these, at the start, run while other workers measure. A draft model
that seems too expensive would never show that it is not. This takes about a hundredth of the time at most."""
TRIED_TOKENS = 2
HOPED_SHARE = 0.25
"""Fraction of the draft model's known cost at which a draft would have to pay; otherwise none is tried."""
EXPECTED_TOKENS = 256
"""Most further tokens that are expected of an answer: few answers come near their limit."""


class DraftThread:
    """Runs single steps of a draft model on the engine thread."""

    def __init__(self, engine: EngineThread, draft: DraftEngine) -> None:
        self._engine = engine
        self._draft = draft

    def start(self, batch: Batch) -> Awaitable[StepResult]:
        return self._engine.between_steps(functools.partial(self._draft.step, batch))


class _Stream(NamedTuple):
    """A running sequence for which a draft model may propose."""

    sequence: Sequence
    speculation: Speculation
    drafter: ModelDrafter
    params: SamplingParams
    draws_next: bool
    """Whether its next step makes a token known."""


@dataclass(slots=True)
class _DraftState:
    """What the draft model holds of one sequence."""

    pages: list[PageId] = field(default_factory=list)
    computed: int = 0
    """Leading tokens of the sequence that it has computed."""
    beyond: tuple[int, ...] = ()
    """Drafted tokens after these that it has computed too."""
    refused_tokens: int = 0
    """Number of known tokens when catching up was last found not to pay; 0: never."""

    def agree(self, known: list[int]) -> None:
        """Keeps what it has computed of drafted tokens that are known now; the last known token runs again."""
        for token in self.beyond:
            if self.computed >= len(known) or known[self.computed] != token:
                break
            self.computed += 1
        self.beyond = ()
        self.computed = min(self.computed, len(known) - 1)


class ModelDrafts:
    def __init__(
        self,
        draft: DraftEngine,
        engine: EngineThread,
        scheduler: Scheduler,
        limits: SchedulerLimits,
        rates: Rates,
        draft_rates: Rates,
        lends: Callable[[], bool],
    ) -> None:
        """`lends` returns whether other workers use this worker's cores for prompts."""
        self._draft = draft
        self._engine = engine
        self._scheduler = scheduler
        self._limits = limits
        self._rates = rates
        self._draft_rates = draft_rates
        self._lends = lends
        self._states: dict[Sequence, _DraftState] = {}
        self._free = [PageId(page) for page in reversed(range(draft.pages))]
        self._is_off = False
        self._steps_without = 0
        """Steps of streams since the draft model last drew."""

    @property
    def free_pages(self) -> int:
        return len(self._free)

    def begin(self) -> Awaitable[None] | None:
        if self._is_off:
            return None
        self._release_ended()
        scheduler = self._scheduler
        running = [each for each in scheduler.running_sequences if not scheduler.is_being_read(each)]
        streams = [stream for each in running if (stream := _stream_of(each)) is not None]
        if not streams:
            return None
        step = _step_terms(running)
        chosen = self._to_draft(streams, step)
        chosen += self._to_catch_up(streams, step)
        has_drawn = any(row.length for _, row in chosen)
        self._steps_without = 0 if has_drawn else self._steps_without + (step.streams > 0)
        if not chosen and self._steps_without >= TRIED_STEPS:
            chosen = self._to_try(streams, step)
            self._steps_without = 0
        return self._run(chosen) if chosen else None

    async def _run(self, chosen: list[tuple[_Stream, DraftRow]]) -> None:
        rows = [row for _, row in chosen]
        try:
            drafted = await self._engine.between_steps(functools.partial(self._draft.run, rows))
        except EngineLost:
            raise
        except Exception as error:
            log.warning("draft model is off from now on error=%s", error, exc_info=error)
            self._is_off = True
            self._release(list(self._states))
            return
        for terms, seconds in drafted.steps:
            self._draft_rates.observe(terms, seconds)
        self._take_in(chosen, drafted)

    def _take_in(self, chosen: list[tuple[_Stream, DraftRow]], drafted: Drafted) -> None:
        computed = sum(len(row.tokens) + row.length for _, row in chosen)
        for (stream, row), tokens in zip(chosen, drafted.tokens, strict=True):
            state = self._states[stream.sequence]
            state.computed, state.beyond = row.end, tokens[:-1]
            stream.speculation.computed(drafted.seconds * (len(row.tokens) + row.length) / computed)
            if row.length and row.end == len(stream.sequence.known):
                stream.drafter.drafted(stream.sequence.known, tokens)

    # Streams

    def _to_draft(self, streams: list[_Stream], step: StepTerms) -> list[tuple[_Stream, DraftRow]]:
        """Returns what to compute for streams that draft now."""
        ready = [stream for stream in streams if self._may_draft(stream)]
        candidates = [self._candidate(stream) for stream in ready]
        cost, draft_cost = self._rates.cost, self._draft_rates.cost
        if not any(model_lengths(candidates, draft_cost, cost, step, MOST_EXTRA_LOGITS).tokens):
            return []
        beside = [
            each._replace(others=stream.speculation.foreseen(stream.sequence.known, each.most))
            for stream, each in zip(ready, candidates, strict=True)
        ]
        lengths = model_lengths(beside, draft_cost, cost, step, MOST_EXTRA_LOGITS).tokens
        rows = [(stream, self._row(stream, length)) for stream, length in zip(ready, lengths, strict=True) if length]
        return [(stream, row) for stream, row in rows if row is not None]

    def _may_draft(self, stream: _Stream) -> bool:
        if not stream.draws_next or stream.drafter.has_drafted(stream.sequence.known):
            return False
        return self._lacking(stream.sequence) <= MOST_LACKING

    def _candidate(self, stream: _Stream) -> DraftCandidate:
        known = len(stream.sequence.known)
        most = min(most_drafted(stream.sequence, self._limits), self._draft.max_model_len - known, MOST_DRAFTED)
        return DraftCandidate(stream.speculation.model_chance, most, known)

    def _to_try(self, streams: list[_Stream], step: StepTerms) -> list[tuple[_Stream, DraftRow]]:
        """Returns a short draft for one stream, if a draft would pay at a lower cost of the draft model.

        If the draft model lacks many tokens, it runs only one of them first: the draft then only serves to learn the
        cost.
        """
        hoped = StepCost(*(HOPED_SHARE * part for part in dataclasses.astuple(self._draft_rates.cost)))
        for stream in streams:
            candidate = self._candidate(stream)
            lengths = model_lengths([candidate], hoped, self._rates.cost, step, TRIED_TOKENS)
            if not stream.draws_next or not any(lengths.tokens):
                continue
            most = MOST_LACKING if self._lacking(stream.sequence) <= MOST_LACKING else 1
            row = self._row(stream, min(TRIED_TOKENS, candidate.most), most)
            return [] if row is None else [(stream, row)]
        return []

    def _lacking(self, sequence: Sequence) -> int:
        state = self._states.get(sequence)
        if state is None:
            return len(sequence.known)
        state.agree(sequence.known)
        return len(sequence.known) - state.computed

    # Catching up

    def _to_catch_up(self, streams: list[_Stream], step: StepTerms) -> list[tuple[_Stream, DraftRow]]:
        """Returns what to compute for streams that cannot draft yet, as much as the others can wait for."""
        chosen: list[tuple[_Stream, DraftRow]] = []
        left = 0 if self._lends() else self._catch_up_tokens(step)
        for stream in streams:
            if left <= 0:
                break
            lacking = self._lacking(stream.sequence)
            if lacking <= MOST_LACKING or not self._pays(stream, step):
                continue
            row = self._row(stream, 0, min(lacking - 1, left))
            if row is not None:
                chosen.append((stream, row))
                left -= len(row.tokens)
        return chosen

    def _catch_up_tokens(self, step: StepTerms) -> int:
        cost: StepCost = self._draft_rates.cost
        if not step.streams or cost.prompt_token_s <= 0:
            return IDLE_TOKENS
        seconds = CATCH_UP_SHARE * self._rates.cost.of(step)
        return max(LEAST_TOKENS, min(IDLE_TOKENS, int(seconds / cost.prompt_token_s)))

    def _pays(self, stream: _Stream, step: StepTerms) -> bool:
        """Returns whether catching up with a stream pays. Notes a no: it is asked again when the answer has grown."""
        sequence, state = stream.sequence, self._states.get(stream.sequence)
        known = len(sequence.known)
        if known > self._draft.max_model_len - 1:
            return False
        if state is not None and state.refused_tokens and known < state.refused_tokens + MOST_LACKING:
            return False
        left = min(stream.params.max_tokens - sequence.answer_tokens, EXPECTED_TOKENS)
        own = step if step.streams else StepTerms(1, known)
        lacking, costs = self._lacking(sequence), (self._draft_rates.cost, self._rates.cost)
        # The lengths of later steps count: now the stream may be at the end of a block.
        candidate = self._candidate(stream)._replace(most=MOST_DRAFTED)
        if pays_catching_up(candidate, lacking, left, *costs, own):
            return True
        self._states.setdefault(sequence, _DraftState()).refused_tokens = known
        return False

    # Pages

    def _row(self, stream: _Stream, length: int, most: int = MOST_LACKING) -> DraftRow | None:
        """Returns what to compute for a stream: at most this many tokens that it lacks; None if no pages are free."""
        sequence = stream.sequence
        state = self._states.setdefault(sequence, _DraftState())
        known = sequence.known
        if not self._claim(state, max(len(known), state.computed + 1) + length):
            return None
        tokens = tuple(known[state.computed : state.computed + most])
        return DraftRow(tokens, state.computed, tuple(state.pages), draft_params(stream.params), length)

    def _claim(self, state: _DraftState, tokens: int) -> bool:
        """Claims the pages of that many tokens, all or none."""
        missing = -(-tokens // self._draft.block_size) - len(state.pages)
        if missing > len(self._free):
            return False
        state.pages += [self._free.pop() for _ in range(missing)]
        return True

    def _release_ended(self) -> None:
        running = set(self._scheduler.running_sequences)
        self._release([each for each in self._states if each not in running])

    def _release(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            self._free += self._states.pop(sequence).pages


def _draws_next(sequence: Sequence) -> bool:
    return sequence.sampling is not None and len(sequence.known) - sequence.first_query <= 1


def _step_terms(running: list[Sequence]) -> StepTerms:
    """Returns what the next step costs without drafts and prompts."""
    contexts = [len(each.known) for each in running if _draws_next(each)]
    return StepTerms(len(contexts), sum(contexts))


def _stream_of(sequence: Sequence) -> _Stream | None:
    speculation, params = speculation_of(sequence), sequence.sampling
    if speculation is None or speculation.of_model is None or params is None:
        return None
    return _Stream(sequence, speculation, speculation.of_model, params, _draws_next(sequence))
