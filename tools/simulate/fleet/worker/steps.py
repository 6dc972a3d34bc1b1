"""Steps of a simulated worker: the live work loop in virtual time, many equal steps at once.

Tokens are not computed: a step is its chunks, and its length is what the cost model says, times seeded noise. The live
scheduler makes all decisions. The role gets the same calls as a live one, in the same order.
"""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Sequence as ListOf
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from tools.simulate.fleet.event_queue import QueuedEvent
from tools.simulate.fleet.worker.interfaces import SimulatedWorkerView
from twostroke.request import SampledToken
from twostroke.scheduler.batch import Batch, StepResult
from twostroke.scheduler.batching import Chunk, Step, terms_of
from twostroke.scheduler.cost import Budget, StepCost, StepTerms
from twostroke.scheduler.values import AdmittedSequence
from twostroke.worker.branches import Prefetching
from twostroke.worker.role_host import Loop, RoleHandlers
from twostroke.worker.steps.work_loop import StreamSteps

TOKEN = 0
"""Whatever is sampled: it is not looked at."""
SAMPLED = SampledToken(TOKEN)
NOISY_STEPS = 16
"""Steps at once where each has a length of its own: few, as most of a long run is cut short."""

_NO_BATCH = Batch(
    tokens=np.zeros(0, np.int32),
    positions=np.zeros(0, np.int32),
    query_starts=np.zeros(1, np.int32),
    context_lens=np.zeros(0, np.int32),
    block_tables=np.zeros((0, 0), np.int32),
    write_slots=np.zeros(0, np.int64),
)


class ChunksOnly:
    """Builds steps that no model runs."""

    def build(self, chunks: ListOf[Chunk]) -> Step:
        return Step(tuple(chunks), _NO_BATCH)


class StepLengths(Protocol):
    """How long steps take. `StepCost` is one; others are engines that no costs describe exactly."""

    def of(self, terms: StepTerms) -> float:
        """Returns the length of one step."""

    def prompt_fraction(self, terms: StepTerms) -> float:
        """Returns the fraction of a step's time that its prompt tokens take."""


class StepPace:
    """A worker's: lengths of its steps."""

    def __init__(self, cost: StepCost, noise: float, seed: str, lengths: StepLengths | None = None) -> None:
        """`lengths`: what steps take, where that is not what the worker knows of its costs."""
        self.cost = cost
        self._lengths = lengths or cost
        self._noise = noise
        self._draws = random.Random(seed)

    def flight(self, step: Step, begun_s: float, repeats: int) -> Flight:
        """Returns the step, and `repeats` more like it or somewhat fewer."""
        lengths, terms = self._lengths, terms_of(step.chunks)
        length_s = lengths.of(terms)
        growth_s = terms.streams * self.cost.context_token_s
        if repeats and lengths is not self.cost:
            last = replace(terms, context_tokens=terms.context_tokens + repeats * terms.streams)
            growth_s = (lengths.of(last) - length_s) / repeats
        noisy: tuple[float, ...] = ()
        if self._noise:
            repeats = min(repeats, NOISY_STEPS - 1)
            steps = ((length_s + n * growth_s) * self.factor() for n in range(repeats + 1))
            noisy = tuple(itertools.accumulate(steps))
        return Flight(step, terms, begun_s, length_s, growth_s, lengths.prompt_fraction(terms), noisy, 1 + repeats)

    def factor(self) -> float:
        """Draws a factor of a step's length; the mean is 1."""
        if not self._noise:
            return 1.0
        return self._draws.lognormvariate(-(self._noise**2) / 2, self._noise)


@dataclass(slots=True)
class Flight:
    """Equal steps under way, each a little longer than the one before as its streams' contexts grow."""

    step: Step
    terms: StepTerms
    begun_s: float
    first_s: float
    growth_s: float
    prompt_fraction: float
    """Share of the step's length that prompt tokens take."""
    noisy: tuple[float, ...]
    """Seconds from the beginning to the end of each step, where there is noise."""
    steps: int

    def after(self, steps: int) -> float:
        """Returns seconds from the beginning until this many of them have ended."""
        if self.noisy:
            return self.noisy[steps - 1] if steps else 0.0
        return steps * self.first_s + self.growth_s * steps * (steps - 1) / 2

    @property
    def tokens(self) -> int:
        """Tokens that the steps make known."""
        drafts = [chunk for chunk in self.step.chunks if chunk.proposed]  # such a step is the only one
        return self.terms.streams * self.steps + sum(further_tokens(chunk) - len(chunk.proposed) for chunk in drafts)

    @property
    def end_s(self) -> float:
        return self.begun_s + self.after(self.steps)

    def ended_by(self, now_s: float) -> int:
        """Steps that have ended by then."""
        low, high = 0, self.steps
        while low < high:
            middle = (low + high + 1) // 2
            if self.begun_s + self.after(middle) <= now_s:
                low = middle
            else:
                high = middle - 1
        return low

    def cut(self, now_s: float) -> bool:
        """Ends with the step that runs now; False where that is the last one anyway."""
        steps = min(self.steps, self.ended_by(now_s) + 1)
        is_cut = steps < self.steps
        self.steps = steps
        return is_cut


def further_tokens(chunk: Chunk) -> int:
    """Returns how many tokens of a chunk become known besides the drawn one: those of its drafts that are right."""
    return sum(1 for _ in itertools.takewhile(lambda token: token == TOKEN, chunk.proposed))


def repeats(step: Step, block_size: int) -> int:
    """Returns how many more steps would each run only the next token of the same sequences. It assumes that no token
    ends an answer, that nothing else happens to the scheduler, and that no more sequences can be admitted.

    The last of these steps may fill a block or end an answer; none before it does. Steps with drafts differ from one
    to the next.
    """
    least = sys.maxsize
    for chunk in step.chunks:
        sequence, params = chunk.sequence, chunk.sequence.sampling
        if params is None or not chunk.samples or chunk.end - chunk.start != 1 or sequence.proposer is not None:
            return 0
        block_left = block_size - 1 - chunk.start % block_size
        answer_left = params.max_tokens - sequence.answer_tokens
        least = min(least, block_left, answer_left - 1)
    return max(0, least)


def run_ahead(step: Step, times: int) -> Step:
    """Takes in the step in flight as if it had been emitted and planned again `times` times (at most `repeats`).

    Returns the step that is in flight then. What was emitted before it is told to nobody: those are further tokens of
    answers that have begun and do not end.
    """
    if not times:
        return step
    moved, tokens = [], [TOKEN] * times
    for chunk in step.chunks:
        sequence, start = chunk.sequence, chunk.start + times
        sequence.known += tokens
        sequence.computed = max(sequence.computed, start)
        sequence.steps += times
        moved.append(Chunk(sequence, start, chunk.end + times, True))
    return Step(tuple(moved), step.batch)


class StepWatch(Protocol):
    """Gets the events of a simulated worker's steps, besides its role."""

    @property
    def prefetch(self) -> Prefetching: ...

    def admitted(self, admission: AdmittedSequence) -> None:
        """Called before the role is told of an admission."""

    def most_steps(self, flight: Flight) -> int:
        """Returns how many equal steps may run before the role must be called."""

    def preempted(self) -> None: ...

    def ran(self, flight: Flight) -> None: ...


class HostLoop(Loop, Protocol):
    """A work loop, the live one or the simulated one."""

    @property
    def cost(self) -> StepCost:
        """What steps cost, as far as the worker knows."""

    @property
    def stream_steps(self) -> StreamSteps: ...

    def run(self, role: RoleHandlers, watch: StepWatch) -> None:
        """Works for the role from now on."""

    def stop(self) -> Flight | None:
        """Ends the loop, since the worker dies. Returns what has run of the steps under way."""


class PacedWorker(SimulatedWorkerView, Protocol):
    pace: StepPace
    budget: Budget


class SimulatedLoop:
    def __init__(self, host: PacedWorker) -> None:
        self._host = host
        self._queue = host.queue
        self._scheduler = host.scheduler
        self._pace = host.pace
        self.budget = host.budget
        self._role: RoleHandlers | None = None
        self._watch: StepWatch | None = None
        self._flight: Flight | None = None
        self._end: QueuedEvent | None = None
        self._is_woken = False
        self._is_over = False
        self.stream_steps = StreamSteps()

    def run(self, role: RoleHandlers, watch: StepWatch) -> None:
        """Lets the loop work for the role from now on."""
        self._role, self._watch = role, watch

    def wake(self) -> None:
        """Notes a change that the next plan should see."""
        if self._is_over:
            return
        if self._flight is not None:
            self._cut()
            if self._scheduler.has_new:
                self._queue.at(self._queue.now_s, self._admit_new)
        elif not self._is_woken:
            self._is_woken = True
            self._queue.at(self._queue.now_s, self._begin_if_idle)

    @property
    def cost(self) -> StepCost:
        return self._pace.cost

    @property
    def lends(self) -> bool:
        return False

    @property
    def queued_s(self) -> float:
        """Predicted seconds until every prompt token that is to be computed here is computed."""
        return self.budget.drain_s(self._scheduler.load.queued(), self._scheduler.step_tokens)

    def stop(self) -> Flight | None:
        """Stops a worker that dies. Returns what has run of the steps under way."""
        self._is_over = True
        if self._end is not None:
            self._end.cancel()
        flight = self._flight
        steps = flight.ended_by(self._queue.now_s) if flight is not None else 0
        return replace(flight, steps=steps) if flight is not None and steps else None

    def _begin_if_idle(self) -> None:
        self._is_woken = False
        if self._flight is None and not self._is_over:
            self._begin()
            self._host.notify()

    def _begin(self) -> None:
        """Admits, and starts the next steps."""
        scheduler, role, watch = self._scheduler, self._role, self._watch
        assert role is not None
        assert watch is not None
        admitted = self._admit()
        role.planning()
        step = scheduler.plan(self.budget)
        preempted = scheduler.take_preempted()
        for sequence in preempted:
            watch.preempted()
            role.preempted(sequence)
        if step is None:
            if preempted:
                self.wake()  # their pages may admit others
            return
        may_admit_more = bool(preempted or (admitted and scheduler.waiting))
        flight = self._pace.flight(
            step, self._queue.now_s, 0 if may_admit_more else repeats(step, self._host.shape.block_size)
        )
        flight.steps = min(flight.steps, watch.most_steps(flight))
        self._flight = flight
        self._end = self._queue.at(flight.end_s, self._ended)

    def _admit(self) -> ListOf[AdmittedSequence]:
        scheduler, role, watch = self._scheduler, self._role, self._watch
        assert role is not None
        assert watch is not None
        watch.prefetch.begin_admission(scheduler.next_waiting())
        admitted = scheduler.admit()
        for admission in admitted:
            watch.admitted(admission)
            role.admitted(admission)
        watch.prefetch.end_admission(scheduler.running)
        return admitted

    def _admit_new(self) -> None:
        """Admits new sequences beside the step that runs, as the live work loop does."""
        watch = self._watch
        assert watch is not None
        if not watch.prefetch.admits_beside_steps:
            return
        if self._flight is not None and self._scheduler.has_new and not self._is_over:
            self._admit()
            self._host.notify()

    def _cut(self) -> None:
        flight = self._flight
        assert flight is not None
        assert self._end is not None
        if flight.steps > 1 and flight.cut(self._queue.now_s):
            self._end.cancel()
            self._end = self._queue.at(flight.end_s, self._ended)

    def _ended(self) -> None:
        flight, role, watch = self._flight, self._role, self._watch
        assert flight is not None
        assert role is not None
        assert watch is not None
        self._flight = None
        watch.ran(flight)
        step = run_ahead(flight.step, flight.steps - 1)
        emissions = self._scheduler.update(step, StepResult((SAMPLED,) * flight.terms.streams, 0.0))
        self.stream_steps.observe(step, emissions)
        if flight.terms.prompt_tokens:
            role.computed(step, flight.first_s)
        self._begin()
        role.emitted(emissions)
        self._host.notify()
