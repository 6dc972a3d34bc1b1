"""The sweep before a worker serves: it tells all costs, and nothing of it is left."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.unit.engine.tiny import PAGE_BYTES, save_tiny
from tests.unit.worker.rig import decode, paced, prefill
from twostroke.config import CacheConfig, ModelConfig, Role, ScheduleConfig, WorkerConfig
from twostroke.engine.backends.paced.runner import PacedSpec
from twostroke.engine.build import build_runner
from twostroke.engine.cores.borrowing import TRIED_STEPS
from twostroke.engine.cores.cores import Cores
from twostroke.engine.loop import EngineThread
from twostroke.kv_cache.groups.page_state import PageState
from twostroke.kv_cache.memory import PageMemory
from twostroke.scheduler.batch import Batch, StepResult
from twostroke.scheduler.cost import StepCost, StepTerms
from twostroke.scheduler.step_target import USUAL_S
from twostroke.worker.measured.rates import Rates
from twostroke.worker.steps.calibration import (
    COMPUTED_BUDGET,
    LONGEST_STEP_S,
    MOST_STEP_TOKENS,
    PACED_BUDGET,
    CalibrationLimits,
    SweepBudget,
    calibrate,
    step_tokens_within,
    sweep,
)

SPEC = PacedSpec(
    prefill_tokens_per_s=8000, prefill_step_ms=2, prefill_us_per_1k_pairs=20, step_ms=4, step_us_per_seq=500
)


class Priced:
    """A runner whose steps cost what they are said to, without taking that long."""

    def __init__(self, cost: StepCost) -> None:
        self.cost = cost
        self.ran: list[StepTerms] = []

    def run(self, batch: Batch) -> StepResult:
        self.ran.append(StepTerms.of(batch))
        return StepResult((), self.cost.of(self.ran[-1]))

    def close(self) -> None: ...


def reach(**changes: int | bool) -> CalibrationLimits:
    usual = {"step_tokens": 128, "max_model_len": 4096, "max_sequences": 64, "pages": 500, "block_size": 16}
    return CalibrationLimits(**(usual | {"runs_decode": True} | changes))  # type: ignore[arg-type]  # of the test's own keys


def calibrated(runner: Priced, of: CalibrationLimits, effort: SweepBudget = PACED_BUDGET) -> Rates:
    rates, engine = Rates(), EngineThread(runner)
    asyncio.run(calibrate(engine, rates, of, effort))
    engine.close()
    return rates


def chunk(tokens: int, context: int) -> StepTerms:
    return StepTerms(0, 0, tokens, tokens * (context + tokens / 2))


def test_a_sweep_tells_what_any_step_costs() -> None:
    rates = calibrated(Priced(SPEC.cost), reach())
    steps = [chunk(tokens, context) for tokens in (16, 100, 128) for context in (0, 900, 2000)]
    for step in [*steps, StepTerms(1, 500), StepTerms(8, 8000), StepTerms(20, 4000)]:
        assert rates.cost.of(step) == pytest.approx(SPEC.cost.of(step), rel=0.1)


def test_a_worker_that_never_samples_is_not_asked_to() -> None:
    runner = Priced(SPEC.cost)
    rates = calibrated(runner, reach(runs_decode=False))
    assert not any(terms.streams for terms in runner.ran)
    assert rates.seconds_per_token > 0
    assert rates.seconds_per_step == 0


def test_the_first_step_of_a_kind_does_not_count_where_runners_warm_up() -> None:
    runner = Priced(SPEC.cost)
    calibrated(runner, reach(), COMPUTED_BUDGET)
    assert runner.ran[0] == runner.ran[1]
    assert runner.ran[2] == runner.ran[3]


def test_a_sweep_is_too_short_to_make_a_worker_try_the_cores_of_others() -> None:
    runner = Priced(StepCost())
    calibrated(runner, reach(), COMPUTED_BUDGET)
    assert max(Counter(runner.ran).values()) < TRIED_STEPS


def test_on_a_slow_machine_one_step_of_each_kind_is_all() -> None:
    runner = Priced(StepCost(step_s=1.0, prompt_step_s=1.0, prompt_token_s=0.1))
    rates = calibrated(runner, reach())
    assert len(runner.ran) == 2
    assert rates.seconds_per_token > 0
    assert rates.seconds_per_step > 0


@pytest.mark.parametrize(
    "small",
    [{"max_model_len": 20}, {"pages": 1}, {"step_tokens": 1}, {"max_sequences": 1}, {"block_size": 256, "pages": 2}],
)
def test_every_step_stays_within_what_the_worker_can_do(small: dict[str, int]) -> None:
    limits = reach(**small)
    for batch in sweep(limits):
        assert len(batch.tokens) <= limits.step_tokens
        assert batch.sequences <= limits.max_sequences
        assert batch.context_lens.max() <= limits.longest
        assert batch.positions.min() >= 0
        assert batch.positions.max() < limits.longest
        assert batch.block_tables.max() < limits.pages
        assert set(batch.write_slots // limits.block_size) == {limits.pages}


@pytest.mark.parametrize(("token_s", "tokens"), [(0.0004, 512), (0.001, 256), (0.003, 128), (0.1, 128)])
def test_a_step_has_as_many_tokens_as_take_a_bearable_time(token_s: float, tokens: int) -> None:
    assert step_tokens_within(StepCost(prompt_step_s=0.002, prompt_token_s=token_s), 128) == tokens


def test_attention_within_the_chunk_counts_too() -> None:
    pair_s = LONGEST_STEP_S / (512 * 512 / 2)
    assert step_tokens_within(StepCost(prompt_token_s=1e-9, prompt_pair_s=1.01 * pair_s), 128) == 256


def test_unknown_costs_change_nothing_and_many_tokens_stay() -> None:
    assert step_tokens_within(StepCost(), 128) == 128
    assert step_tokens_within(StepCost(prompt_token_s=1e-9), 2 * MOST_STEP_TOKENS) == 2 * MOST_STEP_TOKENS


@pytest.mark.parametrize(("given", "allowed"), [(None, MOST_STEP_TOKENS), (96, 96)])
async def test_a_fast_cpu_runs_long_steps_unless_the_operator_says_how_long(
    tmp_path: Path, given: int | None, allowed: int
) -> None:
    model = ModelConfig(model=str(save_tiny(tmp_path)), dtype="float32")
    schedule = ScheduleConfig(max_num_seqs=8, max_num_batched_tokens=given)
    async with prefill(model=model, schedule=schedule) as worker:
        assert worker.host.load_report().costs.step_tokens == worker.host.scheduler.step_tokens == allowed


async def test_a_worker_whose_neighbours_lend_their_cores_measures_in_its_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    happened: list[str] = []

    @contextlib.contextmanager
    def measuring(cores: Cores) -> Iterator[None]:
        happened.append("turn begins")
        yield
        happened.append("turn ends")

    async def recorded(*args: Any) -> None:
        happened.append("measures")
        await calibrate(*args)

    monkeypatch.setattr(Cores, "measuring", measuring)
    monkeypatch.setattr("twostroke.worker.steps.engine_steps.calibrate", recorded)
    async with prefill(model=ModelConfig(model=str(save_tiny(tmp_path)), dtype="bfloat16")):
        assert happened == ["turn begins", "measures", "turn ends"]


def test_a_real_model_is_calibrated_and_its_pages_and_draws_are_as_before(tmp_path: Path) -> None:
    config = WorkerConfig(
        role=Role.DECODE,
        worker_id="decode-0",
        model=ModelConfig(model=str(save_tiny(tmp_path)), dtype="float32"),
        cache=CacheConfig(kv_cache_memory_bytes=20 * PAGE_BYTES),
    )
    built = build_runner(config, tmp_path)
    assert isinstance(built.memory, PageMemory)
    pages = built.memory.data[: built.model.pages]
    pages[:] = np.random.default_rng(3).random(pages.nbytes // 4, np.float32).view(np.uint8).reshape(pages.shape)
    before = hashlib.blake2b(pages.tobytes()).digest()
    generations, state = built.memory.generations.copy(), torch.get_rng_state()
    rates, engine = Rates(), EngineThread(built.runner)
    limits = reach(pages=built.model.pages, max_model_len=built.model.max_model_len)
    asyncio.run(calibrate(engine, rates, limits, COMPUTED_BUDGET))
    assert hashlib.blake2b(pages.tobytes()).digest() == before
    assert (built.memory.generations == generations).all()
    assert torch.equal(torch.get_rng_state(), state)
    assert rates.seconds_per_token > 0
    assert rates.seconds_per_step > 0
    engine.close()
    del pages
    built.memory.close()


async def test_a_worker_knows_its_costs_when_it_begins_to_serve_and_has_published_nothing() -> None:
    slow = paced(prefill_tokens_per_s=20_000, step_ms=5)
    async with prefill(model=slow) as source, decode(model=slow) as target:
        for worker in (source, target):
            load = worker.host.load_report()
            learned_s = load.costs.prompt_token_s * 128 + load.costs.prompt_step_s
            assert 0.5 < learned_s / (128 / 20_000) < 4, "a busy machine makes waits longer"
            assert load.costs.step_tokens == worker.host.scheduler.step_tokens
            assert (load.queued_s, load.prefill_busy_s, list(load.links)) == (0.0, 0.0, [])
            assert worker.host.pool.count(PageState.FREE) == worker.host.pool.total
            assert not worker.host.memory.generations.any()
            assert worker.metric("computed_tokens_total") == 0
        assert 0.5 < target.host.load_report().seconds_per_step / 0.005 < 4
        assert target.host.load_report().costs.step_target_s == USUAL_S, "a paced model has a device of its own"
