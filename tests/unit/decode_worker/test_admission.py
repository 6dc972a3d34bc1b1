"""What a decode worker refuses at once, and what it queues."""

from __future__ import annotations

import time

import pytest

from tests.unit.worker.callers import router_to
from tests.unit.worker.rig import BLOCK, VOCAB, decode, eventually, paced, prompt_of
from twostroke.base.errors import ContextLengthExceeded, DeadlineExceeded, InvalidRequest, Overloaded, ServeError
from twostroke.config import ModelConfig, ScheduleConfig

PAGES = 8
MODEL_LEN = 150
SMALL = ModelConfig(model=paced().model.replace("max_model_len=4096", f"max_model_len={MODEL_LEN}"))


@pytest.mark.parametrize(
    ("prompt", "changes", "field", "words"),
    [
        ([], {}, "prompt", "empty"),
        ([1, 2, VOCAB], {}, "prompt", f"up to {VOCAB - 1}, got {VOCAB}"),
        ([1, 2, 3], {"emitted": [VOCAB + 7]}, "prompt", f"got {VOCAB + 7}"),
        ([5] * 40, {"max_tokens": MODEL_LEN - 39}, "max_tokens", f"{MODEL_LEN + 1}.*serves {MODEL_LEN}"),
        ([5] * 140, {"max_tokens": 1}, "max_tokens", f"whole page pool holds {PAGES * BLOCK} tokens"),
        ([5] * 10, {"emitted": [1, 2], "max_tokens": 2}, "emitted", "all 2 tokens are emitted"),
        ([5] * 40, {"block_hashes": b"x" * 16}, "block_hashes", "1 block hashes for 2 full blocks"),
        ([5] * 40, {"block_hashes": b"x" * 17}, "block_hashes", "multiple of 16"),
        ([5] * 4, {"deadline_s": float("nan")}, "deadline_s", "finite"),
    ],
)
async def test_what_can_never_be_served_is_refused_by_field_and_nothing_is_left(
    prompt: list[int], changes: dict, field: str, words: str
) -> None:
    async with decode(pages=PAGES, model=SMALL) as worker, router_to(worker) as router:
        with pytest.raises(InvalidRequest, match=words) as refusal:
            await router.open(prompt, **changes)
        assert refusal.value.field == field
        assert worker.is_idle
        assert not worker.role._requests
        assert len((await router.answer([1, 2, 3], 2, request_id="next")).tokens) == 2


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -1.0),
        ("temperature", float("inf")),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("top_p", float("nan")),
        ("min_p", 2.0),
        ("min_p", float("nan")),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", 1e-45),
        ("repetition_penalty", 1e39),
        ("presence_penalty", float("nan")),
        ("frequency_penalty", -2.5),
        ("max_tokens", 2**31),
    ],
)
async def test_sampling_out_of_range_is_refused_by_field(name: str, value: float) -> None:
    async with decode() as worker, router_to(worker) as router:
        message = router.message([1, 2, 3])
        setattr(message.request.sampling, name, value)
        with pytest.raises(InvalidRequest, match=name) as refusal:
            await router._ask(router._stub.Open(message, metadata=router._peer.metadata))
        assert refusal.value.field == name
        assert worker.is_idle


@pytest.mark.parametrize("field", ["logit_bias", "stop_token_ids"])
async def test_token_ids_that_the_model_does_not_have_are_refused_by_field(field: str) -> None:
    async with decode() as worker, router_to(worker) as router:
        message = router.message([1, 2, 3])
        if field == "logit_bias":
            message.request.sampling.bias_tokens.append(VOCAB)
            message.request.sampling.bias_values.append(1.0)
        else:
            message.request.sampling.stop_token_ids.append(VOCAB)
        with pytest.raises(InvalidRequest, match=f"up to {VOCAB - 1}, got {VOCAB}") as refusal:
            await router._ask(router._stub.Open(message, metadata=router._peer.metadata))
        assert refusal.value.field == field
        assert worker.is_idle


async def test_a_deadline_that_has_passed_is_refused() -> None:
    async with decode() as worker, router_to(worker) as router:
        with pytest.raises(DeadlineExceeded, match="had passed"):
            await router.open([1, 2, 3], deadline_s=time.time() - 1)
        assert worker.is_idle


async def test_the_longest_request_that_fits_the_pool_is_served() -> None:
    async with decode(pages=PAGES) as worker, router_to(worker) as router:
        got = await router.answer(prompt_of(100), PAGES * BLOCK - 100)
        assert got.last.finish_reason == "length"
        assert len(got.tokens) == PAGES * BLOCK - 100
        assert worker.metric("preemptions_total") == 0


async def test_a_full_queue_refuses_and_leaves_the_others_alone() -> None:
    schedule = ScheduleConfig(max_num_seqs=1, max_num_batched_tokens=64, max_waiting=2)
    async with decode(schedule=schedule, model=paced(step_ms=5)) as worker, router_to(worker) as router:
        open_ones = [await router.open(prompt_of(20), 50, request_id="0")]
        await eventually(lambda: worker.host.scheduler.running == 1)
        open_ones += [await router.open(prompt_of(20), 3, request_id=str(i)) for i in (1, 2)]
        with pytest.raises(Overloaded, match="queue is full"):
            await router.open(prompt_of(20), 3, request_id="3")
        assert worker.role.open_requests == 3
        for answer in open_ones:
            await answer.done.wait()
            assert not answer.last.error.kind


async def test_a_refusal_reaches_the_caller_as_the_class_that_was_raised() -> None:
    async with decode() as worker, router_to(worker) as router:
        with pytest.raises(ServeError) as refusal:
            await router.open([1], attempt=0, max_tokens=5000)
        assert type(refusal.value) is ContextLengthExceeded
