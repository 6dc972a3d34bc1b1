"""A decode worker that speculates: the same answers in fewer steps, and only where operator and client allow it."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from decode_worker.speculations import POSITIONS
from tests.unit.worker.callers import router_to
from tests.unit.worker.rig import BLOCK, Running, decode, expected_tokens, paced, prompt_of
from twostroke.base.errors import InvalidRequest
from twostroke.config import DRAFT_MODEL, DRAFTER_NAMES, SPECULATE_AUTO, SPECULATE_OFF, ScheduleConfig
from twostroke.engine.backends.paced.runner import PacedRunner
from twostroke.engine.sampling.sampler import UNSOUND
from twostroke.kv_cache.block import block_hashes_of
from twostroke.rpc.convert import hashes_to_bytes
from twostroke.scheduler.batch import Batch, StepResult

PROMPT = prompt_of(40)
LENGTH = 60
SAMPLED = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
"""A trace that somebody follows."""
AUTO = ScheduleConfig(speculate=SPECULATE_AUTO)


def tokens(worker: Running, name: str, drafter: str) -> float:
    """Drafted or kept tokens of one drafter."""
    name = f"speculation_{name}_tokens_total"
    return sum(worker.metric(name, drafter=drafter, position=str(position)) for position in POSITIONS)


@pytest.mark.parametrize("speculate", [SPECULATE_AUTO, SPECULATE_OFF, "lookup", "suffix"])
async def test_the_same_answer_again_takes_fewer_steps_where_answers_are_remembered(speculate: str) -> None:
    schedule = ScheduleConfig(speculate=speculate)
    async with decode(model=paced(step_ms=1), schedule=schedule) as worker, router_to(worker) as router:
        for number in range(3):
            got = await router.answer(PROMPT, LENGTH, request_id=f"r{number}")
            assert got.tokens == expected_tokens(PROMPT, LENGTH)
        kept = tokens(worker, "kept", "suffix")
        assert (kept > 0) == (speculate in (SPECULATE_AUTO, "suffix"))
        assert kept <= tokens(worker, "drafted", "suffix")
        assert (tokens(worker, "drafted", "lookup") > 0) <= (speculate in (SPECULATE_AUTO, "lookup"))


async def test_time_saved_is_what_kept_tokens_spare_and_a_trace_tells_it_of_its_request() -> None:
    async with decode(model=paced(step_ms=1), schedule=AUTO) as worker, router_to(worker) as router:
        await router.answer(PROMPT, LENGTH, request_id="first")
        again = await router.answer(PROMPT, LENGTH, request_id="again", traceparent=SAMPLED)
        drafted, kept = (
            sum(tokens(worker, name, drafter) for drafter in DRAFTER_NAMES) for name in ("drafted", "kept")
        )
        saved_s, spent_s = (
            sum(worker.metric(f"speculation_{name}_seconds_total", drafter=drafter) for drafter in DRAFTER_NAMES)
            for name in ("saved", "spent")
        )
        assert 0 <= spent_s < saved_s
        assert 0 < kept <= drafted
        kept_spans = worker.host.recorder.find("again")
        assert kept_spans is not None
        facts = next(span.attributes for span in kept_spans.spans if span.name == "decode")
        assert 0 < facts["kept_tokens"] <= facts["drafted_tokens"]
        assert facts["steps"] == LENGTH - facts["kept_tokens"]
        assert facts["speculation_saved_s"] > 0
        assert facts["kept.suffix"] > 0
        assert {name: (told.drafted, told.kept) for name, told in again.last.drafts.items()} == {
            name: (facts[f"drafted.{name}"], facts[f"kept.{name}"]) for name in DRAFTER_NAMES if f"kept.{name}" in facts
        }
        for what in ("drafted", "kept"):
            assert sum(facts.get(f"{what}.{name}", 0) for name in DRAFTER_NAMES) == facts[f"{what}_tokens"]


async def test_a_request_may_narrow_who_proposes_and_never_widen_it() -> None:
    async with decode(model=paced(step_ms=1), schedule=AUTO) as worker, router_to(worker) as router:
        await router.answer(PROMPT, LENGTH, request_id="first")
        for speculation in (SPECULATE_OFF, "lookup", "a name of a later release"):
            await router.answer(PROMPT, LENGTH, request_id=speculation, speculation=speculation)
        assert tokens(worker, "drafted", "suffix") == 0
        await router.answer(PROMPT, LENGTH, request_id="suffix", speculation="suffix")
        assert tokens(worker, "kept", "suffix") > 0
    schedule = ScheduleConfig(speculate=SPECULATE_OFF)
    async with decode(model=paced(step_ms=1), schedule=schedule) as worker, router_to(worker) as router:
        for number in range(2):
            await router.answer(PROMPT, LENGTH, request_id=f"r{number}", speculation="suffix")
        assert tokens(worker, "drafted", "suffix") == 0


async def test_a_draft_model_that_is_not_there_is_refused_unless_an_answer_goes_on() -> None:
    async with decode(model=paced(step_ms=1), schedule=AUTO) as worker, router_to(worker) as router:
        with pytest.raises(
            InvalidRequest, match="no draft model is served here; leave it away, or say one of auto"
        ) as no:
            await router.open(PROMPT, LENGTH, speculation=DRAFT_MODEL)
        assert no.value.field == "speculation"
        emitted = expected_tokens(PROMPT, LENGTH)[:8]
        hashes = hashes_to_bytes(block_hashes_of([*PROMPT, *emitted], BLOCK))
        options = {"speculation": DRAFT_MODEL, "emitted": emitted, "block_hashes": hashes}
        assert (await router.answer(PROMPT, LENGTH, **options)).tokens == expected_tokens(PROMPT, LENGTH)[8:]


async def test_answers_with_another_salt_are_not_proposed() -> None:
    async with decode(model=paced(step_ms=1), schedule=AUTO) as worker, router_to(worker) as router:
        for number in range(3):
            salt = bytes([number])
            hashes = hashes_to_bytes(block_hashes_of(PROMPT, BLOCK, salt))
            await router.answer(PROMPT, LENGTH, request_id=f"r{number}", salt=salt, block_hashes=hashes)
        assert tokens(worker, "drafted", "suffix") == 0


async def test_drafts_behind_a_row_that_is_not_sound_end_their_answer_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    run = PacedRunner.run

    def unsound(self: PacedRunner, batch: Batch) -> StepResult:
        result = run(self, batch)
        if not batch.proposed_tokens:
            return result
        row = next(sample.row for sample in batch.samples if sample.behind)
        drawn = zip(batch.samples, result.tokens, strict=True)
        return replace(result, tokens=tuple(UNSOUND if sample.row == row else token for sample, token in drawn))

    async with decode(model=paced(step_ms=1), schedule=AUTO) as worker, router_to(worker) as router:
        await router.answer(PROMPT, LENGTH, request_id="first")
        other = prompt_of(30, seed=5)
        neighbour = asyncio.create_task(router.answer(other, LENGTH, request_id="neighbour", speculation=SPECULATE_OFF))
        monkeypatch.setattr(PacedRunner, "run", unsound)
        failed = await router.open(PROMPT, LENGTH, request_id="again")
        async with asyncio.timeout(60):
            await failed.done.wait()
            assert (await neighbour).tokens == expected_tokens(other, LENGTH)
        assert len(failed.tokens) < LENGTH
