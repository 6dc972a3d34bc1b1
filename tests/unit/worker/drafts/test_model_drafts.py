"""A draft model beside a scheduler: it reads its own tokens alone, holds nothing that it need not, and may fail."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest

from tests.unit.scheduler.bench import Bench
from tests.unit.scheduler.symbolic import VOCABULARY, answer_alone, next_token
from twostroke.engine.drafts.engine import DraftEngine
from twostroke.engine.loop import EngineThread
from twostroke.kv_cache.memory import PageMemory
from twostroke.request import SampledToken, SamplingParams
from twostroke.scheduler.batch import Batch, StepResult
from twostroke.scheduler.constraints.drafting import speculation_of
from twostroke.scheduler.cost import StepCost, StepTerms
from twostroke.scheduler.sequence import Sequence
from twostroke.speculation.drafters import ModelDrafter
from twostroke.speculation.speculation import Acceptance, Outcome, Speculation
from twostroke.worker.drafts.model_drafts import TRIED_STEPS, TRIED_TOKENS, ModelDrafts
from twostroke.worker.measured.rates import Rates

BLOCK = 4
COST = StepCost(step_s=0.1, stream_s=0.001, prompt_token_s=0.001)
DRAFT_COST = StepCost(step_s=0.01, stream_s=0.0001, prompt_token_s=0.0001)
LONGEST = 200


class SteadyRates(Rates):
    """Costs that no step changes."""

    def __init__(self, cost: StepCost) -> None:
        super().__init__()
        self.cost = cost

    def observe(self, terms: object, seconds: float) -> None: ...


class LearningRates(SteadyRates):
    """Costs that are known to be others once a step has drawn: those of `cost`, after `said`."""

    def __init__(self, said: StepCost, cost: StepCost) -> None:
        super().__init__(said)
        self._true = cost
        self.draws = 0

    def observe(self, terms: object, seconds: float) -> None:
        assert isinstance(terms, StepTerms)
        if terms.streams:
            self.cost = self._true
            self.draws += 1


class LegibleRunner:
    """Its pages hold (position, token). It mostly draws what the symbolic model would, and is wrong now and then."""

    def __init__(self, wrong: int) -> None:
        self.wrong = wrong
        self.facts: dict[int, tuple[int, int]] = {}
        self.most_rows = 0
        self.fails = False

    def run(self, batch: Batch) -> StepResult:
        if self.fails:
            raise MemoryError("no room for activations")
        for slot, position, token in zip(batch.write_slots, batch.positions, batch.tokens, strict=True):
            self.facts[int(slot)] = (int(position), int(token))
        self.most_rows = max(self.most_rows, len(batch.tokens))
        drawn = [self._drawn(self._context(batch, each.row), each.params) for each in batch.samples]
        return StepResult(tuple(map(SampledToken, drawn)), 0.01)

    def _drawn(self, context: list[int], params: SamplingParams) -> int:
        token = next_token(context, params.seed)
        return (token + 1) % VOCABULARY if len(context) % self.wrong == 0 else token

    def _context(self, batch: Batch, row: int) -> list[int]:
        facts = [
            self.facts[int(batch.block_tables[row, position // BLOCK]) * BLOCK + position % BLOCK]
            for position in range(batch.context_lens[row])
        ]
        assert [position for position, _ in facts] == list(range(batch.context_lens[row]))
        return [token for _, token in facts]

    def close(self) -> None: ...


class Drafting:
    """A bench whose streams a draft model drafts for."""

    def __init__(self, bench: Bench, drafts: ModelDrafts, runner: LegibleRunner) -> None:
        self.bench = bench
        self.drafts = drafts
        self.runner = runner
        self.acceptance = Acceptance()

    def answer(self, prompt: list[int], max_tokens: int) -> Sequence:
        params = SamplingParams(seed=1, max_tokens=max_tokens, ignore_eos=True)
        sequence = self.bench.sequence(prompt, params)
        sequence.proposer = Speculation([ModelDrafter()], self.acceptance)
        self.bench.scheduler.enqueue(sequence)
        return sequence

    async def step(self) -> None:
        """Draft, plan, run and update."""
        bench = self.bench
        bench.admit()
        drafting = self.drafts.begin()
        if drafting is not None:
            await drafting
        step = bench.scheduler.plan(SteadyRates(COST).budget(1.0))
        if step is not None:
            bench.scheduler.update(step, bench.runner.run(step))
        bench.pool.check_integrity()

    async def finish(self, sequences: list[Sequence]) -> int:
        """Runs until all have ended; returns the steps that took."""
        for steps in range(1, 1000):
            await self.step()
            if all(each.ended for each in sequences):
                return steps
        raise AssertionError("they do not end")


def outcome_of(sequence: Sequence) -> Outcome:
    speculation = speculation_of(sequence)
    assert speculation is not None
    return speculation.outcome


@asynccontextmanager
async def drafting(
    *, pages: int = 64, wrong: int = 7, bench_pages: int = 64, draft_rates: Rates | None = None
) -> AsyncIterator[Drafting]:
    runner, bench = LegibleRunner(wrong), Bench(bench_pages)
    draft = DraftEngine(runner, PageMemory(pages, 64), BLOCK, LONGEST)
    engine = EngineThread(runner)
    rates = SteadyRates(COST), draft_rates or SteadyRates(DRAFT_COST)
    drafts = ModelDrafts(draft, engine, bench.scheduler, bench.limits, *rates, lambda: False)
    yield Drafting(bench, drafts, runner)
    assert drafts.begin() is None, "nothing runs"
    assert drafts.free_pages == pages
    await asyncio.to_thread(engine.close)
    draft.memory.close()


async def test_answers_are_the_same_in_fewer_steps_whatever_the_draft_model_gets_wrong() -> None:
    draws = random.Random(3)
    for wrong in (1, 2, 5, 1000):
        async with drafting(wrong=wrong) as rig:
            prompts = [[draws.randrange(6) for _ in range(draws.randrange(1, 40))] for _ in range(3)]
            asked = [rig.answer(prompt, 40) for prompt in prompts]
            steps = await rig.finish(asked)
            for prompt, sequence in zip(prompts, asked, strict=True):
                params = sequence.sampling
                assert params is not None
                assert sequence.known[len(prompt) :] == answer_alone(prompt, params, 4096)[0]
            assert (steps < 40) == (wrong > 1)


async def test_a_long_prompt_is_caught_up_with_in_small_parts_beside_streams() -> None:
    async with drafting() as rig:
        stream = rig.answer([1, 2], 60)
        await rig.step()
        await rig.step()
        other = rig.answer([3] * 150, 40)
        await rig.finish([stream, other])
        assert rig.runner.most_rows <= 70
        assert outcome_of(other).kept > 0


async def test_a_stream_for_which_pages_are_out_goes_on_without_the_draft_model() -> None:
    async with drafting(pages=12, wrong=1000) as rig:
        asked = [rig.answer([number] * 20, 20) for number in range(1, 4)]
        await rig.finish(asked)
        kept = [outcome_of(each).kept for each in asked]
        assert min(kept) == 0 < max(kept)


async def test_an_answer_that_is_being_read_on_another_thread_is_not_asked_for_proposals() -> None:
    """The state of its grammar belongs to that thread: asking it raises there or here."""
    async with drafting(wrong=1000) as rig:
        slow, other = rig.answer([1] * 8, 20), rig.answer([2] * 8, 20)
        await rig.step()
        await rig.step()
        late, speculation = rig.bench.scheduler._emitter.late, speculation_of(slow)
        assert speculation is not None
        late[slow] = cast(Any, None)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(speculation, "foreseen", lambda known, most: pytest.fail("its reader works"))
            for _ in range(8):
                if (drafting_now := rig.drafts.begin()) is not None:
                    await drafting_now
        late.clear()
        await rig.finish([slow, other])


async def test_preempted_and_ended_answers_hold_no_page_of_the_draft_model() -> None:
    async with drafting(wrong=1000, bench_pages=16) as rig:
        asked = [rig.answer([number] * 8, 30) for number in range(1, 4)]
        ended = rig.answer([5] * 8, 30)
        await rig.step()
        await rig.step()
        rig.bench.scheduler.end(ended)
        await rig.finish(asked)
        assert sum(each.preemptions for each in asked) > 0
        for number, sequence in enumerate(asked, 1):
            assert sequence.sampling is not None
            assert sequence.known[8:] == answer_alone([number] * 8, sequence.sampling, 4096)[0]


async def test_a_draft_model_that_fails_is_off_with_one_warning_and_no_answer_fails(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with drafting(wrong=1000) as rig:
        sequence = rig.answer([1] * 8, 30)
        for _ in range(3):
            await rig.step()
        rig.runner.fails = True
        with caplog.at_level(logging.WARNING):
            await rig.finish([sequence])
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert sequence.sampling is not None
        assert sequence.known[8:] == answer_alone([1] * 8, sequence.sampling, 4096)[0]


@pytest.mark.parametrize("prompt_tokens", [4, 40])
async def test_a_draft_model_that_was_measured_too_dear_is_tried_again_and_then_drafts(prompt_tokens: int) -> None:
    dear = StepCost(step_s=0.2, stream_s=0.002, prompt_token_s=0.002)
    learning = LearningRates(dear, DRAFT_COST)
    async with drafting(wrong=1000, draft_rates=learning, bench_pages=128) as rig:
        sequence = rig.answer([1] * prompt_tokens, 150)
        steps = await rig.finish([sequence])
        assert TRIED_STEPS < steps < TRIED_STEPS + 40
        assert sequence.sampling is not None
        assert sequence.known[prompt_tokens:] == answer_alone([1] * prompt_tokens, sequence.sampling, 4096)[0]


@pytest.mark.parametrize("times", [2, 100])
async def test_a_draft_model_that_is_too_dear_is_tried_seldom_and_never_where_it_is_hopeless(times: int) -> None:
    dear = StepCost(step_s=times * COST.step_s, stream_s=0.002, prompt_token_s=0.002)
    learning = LearningRates(dear, dear)
    async with drafting(wrong=1000, draft_rates=learning, bench_pages=128) as rig:
        steps = await rig.finish([rig.answer([1] * 4, 180)])
        assert steps > 170
        assert learning.draws == (2 * TRIED_TOKENS if times == 2 else 0)


async def test_an_answer_knows_how_long_the_draft_model_computed_for_it() -> None:
    async with drafting() as rig:
        sequence = rig.answer([1] * 30, 20)
        await rig.finish([sequence])
        outcome = outcome_of(sequence)
        assert 0 < outcome.kept <= outcome.run
        assert outcome.draft_s > 0
