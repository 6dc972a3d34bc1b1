"""A step fails: who is to blame, who goes on, and when the worker ends itself."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from types import SimpleNamespace

import pytest

from tests.unit.worker.callers import Received, Router, router_to
from tests.unit.worker.rig import Running, decode, eventually, expected_tokens, paced, prefill, prompt_of
from twostroke.base.errors import EngineLost, PeerLost
from twostroke.rpc.v1 import control_pb2
from twostroke.scheduler.batch import Batch, StepResult
from twostroke.worker import worker as worker_module
from twostroke.worker.page_forms.branch import PageForms
from twostroke.worker.steps import engine_check
from twostroke.worker.steps.engine_check import MOST_FAILED_STEPS, PROBE_TOKENS

PROMPTS = [prompt_of(40, seed=seed) for seed in range(1, 7)]
LONG = 300
"""Tokens: none of these answers is whole before the engine fails."""
POISON = 13
"""The seed of a request that no engine can compute."""


def with_fault(worker: Running, fails: Callable[[Batch], Exception | None]) -> None:
    runner = worker.host.engine._runner
    run = runner.run

    def broken(batch: Batch) -> StepResult:
        error = fails(batch)
        if error is not None:
            raise error
        return run(batch)

    runner.run = broken  # type: ignore[method-assign]


@contextlib.contextmanager
def losing_its_engine(why: str | None = None) -> Iterator[None]:
    """Around a worker that ends so."""
    with pytest.raises(EngineLost, match=why):
        yield


def is_probe(batch: Batch) -> bool:
    return batch.sequences == 1 and len(batch.tokens) == PROBE_TOKENS


def is_poisoned(batch: Batch) -> bool:
    return any(row.params.seed == POISON for row in batch.samples)


async def opened(router: Router, seeds: list[int], max_tokens: int = 12) -> list[Received]:
    return [
        await router.open(prompt, max_tokens, request_id=f"r{number}", seed=seed)
        for number, (prompt, seed) in enumerate(zip(PROMPTS, seeds, strict=False))
    ]


async def test_a_request_that_fails_every_step_ends_alone_and_the_others_go_on() -> None:
    async with decode() as worker, router_to(worker) as router:
        with_fault(worker, lambda batch: ValueError("no such row") if is_poisoned(batch) else None)
        answers = await opened(router, [1, 2, POISON, 4, 5, 6])
        await asyncio.gather(*(answer.done.wait() for answer in answers))
        kinds = [answer.last.error.kind for answer in answers]
        assert kinds == ["", "", "StepFailed", "", "", ""]
        assert "no such row" in answers[2].last.error.message
        for number in (0, 1, 3, 4, 5):
            assert answers[number].tokens == expected_tokens(PROMPTS[number], 12, seed=number + 1)
        assert worker.metric("failed_steps_total", outcome="request_failed") == 1
        assert worker.host.load_report().state == control_pb2.WORKER_STATE_SERVING


async def test_a_step_that_fails_once_harms_nobody() -> None:
    failures = iter([MemoryError("too many at once")])
    async with decode(model=paced(step_ms=5)) as worker, router_to(worker) as router:
        with_fault(worker, lambda batch: None if batch.sequences < 3 else next(failures, None))
        answers = await opened(router, [1, 2, 3, 4], 60)
        await asyncio.gather(*(answer.done.wait() for answer in answers))
        for number, answer in enumerate(answers):
            assert answer.tokens == expected_tokens(PROMPTS[number], 60, seed=number + 1)
        assert worker.metric("failed_steps_total", outcome="repeated") == 1


async def test_requests_that_are_closed_while_parts_of_a_failed_step_run_again_trouble_nobody() -> None:
    async with decode(model=paced(step_ms=5)) as worker, router_to(worker) as router:
        is_broken = False

        def fails(batch: Batch) -> Exception | None:
            if not is_broken or is_probe(batch):
                return None
            if batch.sequences < 4:
                time.sleep(0.15)
                return None
            return ValueError("too many rows")

        with_fault(worker, fails)
        answers = await opened(router, [1, 2, 3, 4], LONG)
        await eventually(lambda: all(len(answer.tokens) > 2 for answer in answers))
        is_broken = True
        seen = len(answers[0].tokens)
        await eventually(lambda: worker.host.scheduler._in_flight and len(worker.host.scheduler._in_flight) < 4)
        is_broken = False
        await router.close("r0")
        await eventually(lambda: len(answers[1].tokens) > seen + 10)
        again = await router.answer(PROMPTS[4], 5, request_id="again")
        assert again.tokens == expected_tokens(PROMPTS[4], 5)


async def test_several_requests_that_fail_together_end_alone_while_one_beside_them_succeeds() -> None:
    async with decode(model=paced(step_ms=5)) as worker, router_to(worker) as router:
        is_broken = False
        with_fault(worker, lambda batch: ValueError("odd") if is_broken and is_poisoned(batch) else None)
        answers = await opened(router, [POISON, POISON, POISON, POISON, POISON, 6], 60)
        await eventually(lambda: all(len(answer.tokens) > 2 for answer in answers))
        is_broken = True
        await asyncio.gather(*(answer.done.wait() for answer in answers))
        assert [answer.last.error.kind for answer in answers] == ["StepFailed"] * 5 + [""]
        assert answers[5].tokens == expected_tokens(PROMPTS[5], 60, seed=6)


async def test_poisoned_requests_one_after_the_other_do_not_end_an_engine_that_computes_others() -> None:
    async with decode() as worker, router_to(worker) as router:
        with_fault(worker, lambda batch: ValueError("odd") if is_poisoned(batch) else None)
        for number in range(MOST_FAILED_STEPS + 3):
            prompt = prompt_of(40, seed=100 + number)
            right = await router.answer(prompt, 3, request_id=f"h{number}")
            assert right.tokens == expected_tokens(prompt, 3)
            got = await router.answer(PROMPTS[0], 3, request_id=f"p{number}", seed=POISON)
            assert got.last.error.kind == "StepFailed"


async def ends(worker: Running, answers: list[Received]) -> None:
    """Every open answer is told to go on elsewhere, and nothing new is taken."""
    await asyncio.gather(*(answer.done.wait() for answer in answers))
    assert {answer.last.error.kind for answer in answers} == {"EngineLost"}
    assert worker.host.load_report().state == control_pb2.WORKER_STATE_DEAD
    await eventually(worker.worker._stop.is_set)


@pytest.mark.parametrize("how", ["always raises", "the device is gone", "probes go wrong", "probes hang"])
async def test_an_engine_that_cannot_be_trusted_ends_the_worker(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_check, "PROBE_TIMEOUT_S", 0.2)
    is_broken, probes = False, 0

    def fails(batch: Batch) -> Exception | None:
        nonlocal probes
        probes += is_broken and is_probe(batch)
        if not is_broken or (is_probe(batch) and how == "probes go wrong"):
            return None
        if is_probe(batch) and how == "probes hang":
            time.sleep(1)
        return EngineLost("illegal address") if how == "the device is gone" else RuntimeError("no more steps")

    with losing_its_engine():
        async with decode(model=paced(step_ms=5)) as worker, router_to(worker) as router:
            with_fault(worker, fails)
            answers = await opened(router, [1, 2, 3], LONG)
            await eventually(lambda: all(len(answer.tokens) > 2 for answer in answers))
            is_broken = True
            if how == "probes go wrong":
                worker.host.steps.check._expected = [99999]
            await ends(worker, answers)
            for number, answer in enumerate(answers):
                assert answer.tokens == expected_tokens(PROMPTS[number], len(answer.tokens), seed=number + 1)
            assert worker.metric("failed_steps_total", outcome="engine_lost") == 1
            assert probes == (how != "the device is gone")
            with pytest.raises(PeerLost):
                await router.open(PROMPTS[0], 3, request_id="late")


async def test_a_device_that_hangs_does_not_keep_the_process_from_ending(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "CLOSE_LOST_S", 0.2)
    async with asyncio.timeout(60):
        with losing_its_engine("the device is gone"):
            async with decode(model=paced(step_ms=5)) as worker, router_to(worker) as router:
                monkeypatch.setattr(worker.host.digests, "close", asyncio.Event().wait)
                with_fault(worker, lambda batch: EngineLost("the device is gone"))
                await ends(worker, await opened(router, [1]))


async def test_conversions_of_pages_end_last_since_a_device_that_hangs_may_keep_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    closed: list[str] = []

    def noting(name: str, close: Callable[[], Awaitable[None]]) -> Callable[[], Awaitable[None]]:
        async def noted() -> None:
            closed.append(name)
            await close()

        return noted

    async with decode() as worker:
        host = worker.host
        others = [(type(each).__name__, each) for each in host.branches.each if not isinstance(each, PageForms)]
        (forms,) = (each for each in host.branches.each if isinstance(each, PageForms))
        ending = [*others, *((transport.name, transport) for transport in host.transports)]
        for name, each in ending:
            monkeypatch.setattr(each, "close", noting(name, each.close))
        converter = SimpleNamespace(page_s=0.0)
        end = SimpleNamespace(close=noting("conversions", partial(asyncio.sleep, 0)), converter=converter)
        monkeypatch.setattr(forms, "_end", end)
    assert closed == [*(name for name, _ in ending), "conversions"]


async def test_what_else_goes_wrong_meanwhile_does_not_hide_that_the_engine_is_lost() -> None:
    """Else its process would wait for the engine's thread."""

    def broken() -> None:
        raise ValueError("cannot be closed")

    with losing_its_engine("the device is gone"):
        async with decode(model=paced(step_ms=5)) as worker, router_to(worker) as router:
            assert worker.worker._role is not None
            worker.worker._role.close = broken  # type: ignore[method-assign]
            with_fault(worker, lambda batch: EngineLost("the device is gone"))
            await ends(worker, await opened(router, [1]))


async def test_steps_that_fail_again_and_again_end_the_worker_though_probes_succeed() -> None:
    with losing_its_engine(f"more than {MOST_FAILED_STEPS} steps"):
        async with decode() as worker, router_to(worker) as router:
            with_fault(worker, lambda batch: ValueError("odd") if is_poisoned(batch) else None)
            for number in range(MOST_FAILED_STEPS):
                got = await router.answer(PROMPTS[0], 3, request_id=f"p{number}", seed=POISON)
                assert got.last.error.kind == "StepFailed"
            last = await router.open(PROMPTS[0], 3, request_id="last", seed=POISON)
            await ends(worker, [last])


async def test_steps_that_fail_over_hours_do_not() -> None:
    async with decode() as worker, router_to(worker) as router:
        clock = iter(range(0, 3600 * 20, 3600))
        worker.host.steps.check._now_s = lambda: next(clock)
        with_fault(worker, lambda batch: ValueError("odd") if is_poisoned(batch) else None)
        for number in range(MOST_FAILED_STEPS + 3):
            got = await router.answer(PROMPTS[0], 3, request_id=f"p{number}", seed=POISON)
            assert got.last.error.kind == "StepFailed"


async def test_an_engine_that_fails_every_request_but_no_probe_ends_the_worker_at_the_first_crowd() -> None:
    with losing_its_engine("a step failed in each of"):
        async with decode(model=paced(step_ms=5)) as worker, router_to(worker) as router:
            answers = await opened(router, [1, 2, 3, 4, 5], LONG)
            await eventually(lambda: all(answer.tokens for answer in answers))
            with_fault(worker, lambda batch: None if is_probe(batch) else ValueError("odd"))
            await asyncio.gather(*(answer.done.wait() for answer in answers))
            await eventually(worker.worker._stop.is_set)
            assert [answer.last.error.kind for answer in answers] == ["EngineLost"] * 5


async def test_a_prompt_whose_prefill_worker_loses_its_engine_is_computed_where_it_is_decoded() -> None:
    prompt = prompt_of(600)
    with losing_its_engine():
        async with decode() as target, prefill() as source, router_to(target) as router:
            with_fault(source, lambda batch: RuntimeError("no more steps"))
            got = await router.answer(prompt, 5, source=source)
            assert got.tokens == expected_tokens(prompt, 5)
            await eventually(source.worker._stop.is_set)
