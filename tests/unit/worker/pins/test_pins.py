"""Pins on a worker: computed at once, kept over a flood, counted, expired, refused with numbers."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Sequence

import pytest

from tests.trials.chaos.injection.fake_transport import Delay, FaultPlan
from tests.unit.worker.callers import router_to
from tests.unit.worker.pulls.peers import fetched
from tests.unit.worker.rig import (
    BLOCK,
    PAGE_BYTES,
    TOKEN,
    Running,
    decode,
    eventually,
    expected_tokens,
    paced,
    prefill,
    prompt_of,
)
from twostroke.base.errors import Draining, InvalidRequest, PinRefused
from twostroke.base.ids import Epoch
from twostroke.config import ScheduleConfig
from twostroke.kv_cache.block import block_hashes_of
from twostroke.kv_cache.groups.page_state import PageState
from twostroke.kv_cache.pins.pin_table import Pin, pin_id_of
from twostroke.rpc.channel import PeerChannel
from twostroke.rpc.pins import pin_to_message
from twostroke.rpc.v1 import control_pb2, control_pb2_grpc, pins_pb2, pins_pb2_grpc, worker_pb2
from twostroke.worker.pins.branch import Pins

BLOCKS = 8
SYSTEM = prompt_of(BLOCKS * BLOCK)
QUESTION = (*SYSTEM, 1, 2, 3, 4, 5)


def small(**speed: float) -> dict:
    """Settings of a worker whose model takes 512 tokens."""
    return {"model": paced(**speed).model_copy(update={"max_model_len": 512}), "pages": 64}


SHORT = small()
"""A pool of 64 pages, of which the longest request takes 32: pins may keep a quarter, 16."""


def pin_of(tokens: Sequence[int] = SYSTEM, owner: str = "ops", **changes) -> Pin:
    hashes = tuple(block_hashes_of(tokens, BLOCK))
    return Pin(
        pin_id=pin_id_of(owner, "", hashes[-1]), owner=owner, tokens=tuple(tokens), block_hashes=hashes, **changes
    )


@contextlib.asynccontextmanager
async def pins_at(running: Running):
    """A client of the worker's Pins service."""
    peer = PeerChannel(running.info.address, running.host.config.cluster_token)
    try:
        yield Client(running, peer)
    finally:
        await peer.close()


class Client:
    def __init__(self, running: Running, peer: PeerChannel) -> None:
        self._running, self._peer = running, peer
        self._stub = pins_pb2_grpc.PinsStub(peer.channel)

    async def put(self, pin: Pin, source: worker_pb2.PageSource | None = None, **changes) -> pins_pb2.HeldPin:
        message = pin_to_message(pin, self._running.info.fingerprint)
        for name, value in changes.items():
            message.ClearField(name)
            getattr(message, name).extend(value) if isinstance(value, list) else setattr(message, name, value)
        request = pins_pb2.PutPinRequest(pin=message, source=source)
        (held,) = (await self._peer.call(self._stub.Put, request, 5)).held
        return held

    async def remove(self, **which: str) -> int:
        return (await self._peer.call(self._stub.Remove, pins_pb2.RemovePinRequest(**which), 5)).removed

    async def listed(self, *, hints: bool = True) -> pins_pb2.ListPinsResponse:
        return await self._peer.call(self._stub.List, pins_pb2.ListPinsRequest(hints=hints), 5)

    async def ready(self) -> list[pins_pb2.HeldPin]:
        """The pins, once all are ready."""
        async with asyncio.timeout(60):
            while True:
                held = list((await self.listed()).held)
                if all(pin.state == pins_pb2.PIN_STATE_READY for pin in held):
                    return held
                await asyncio.sleep(0.005)


@pytest.mark.parametrize("serving", [prefill, decode])
async def test_a_pin_is_computed_at_once_and_survives_a_flood(serving) -> None:
    async with serving(**SHORT) as worker, pins_at(worker) as pins:
        held = await pins.put(pin_of())
        assert (held.blocks, held.bytes, held.state) == (BLOCKS, BLOCKS * PAGE_BYTES, pins_pb2.PIN_STATE_COMPUTING)
        (held,) = await pins.ready()
        assert held.ready_blocks == BLOCKS
        pool = worker.host.pool
        await eventually(lambda: pool.count(PageState.PINNED) == BLOCKS)
        flood = pool.claim(block_hashes_of(prompt_of(BLOCK * (64 - BLOCKS), seed=9), BLOCK), b"", 0)
        assert flood is not None
        assert pool.claim_private() is None
        pool.release(flood.pages)
        assert pool.hits(block_hashes_of(SYSTEM, BLOCK)) == BLOCKS
        assert worker.metric("pinned_pages") == BLOCKS
        assert worker.metric("pinned_bytes") == BLOCKS * PAGE_BYTES
        assert worker.metric("pages", state="pinned") == BLOCKS
        assert await pins.remove(pin_id=held.pin_id) == 1
        assert await pins.remove(pin_id=held.pin_id) == 0
        assert pool.count(PageState.PINNED) == 0


async def test_hits_and_seconds_saved_are_counted_for_who_found_all_of_the_pin() -> None:
    async with (
        decode(**small(prefill_tokens_per_s=5000)) as worker,
        router_to(worker) as router,
        pins_at(worker) as pins,
    ):
        await pins.put(pin_of(SYSTEM[: 2 * BLOCK]))
        await pins.put(pin_of())
        await pins.ready()
        got = await router.answer(QUESTION, 4)
        assert got.tokens == expected_tokens(QUESTION, 4)
        assert got.last.local_tokens == len(SYSTEM)
        await router.answer((*SYSTEM[: 3 * BLOCK], 7, 7), 1, request_id="other")
        short, long = await pins.ready()
        assert (short.hits, long.hits) == (1, 1)
        assert 0 < short.saved_s < long.saved_s
        assert worker.metric("pin_hits_total") == 2
        assert worker.metric("pin_saved_seconds_total") == pytest.approx(short.saved_s + long.saved_s)


async def test_a_decode_worker_pulls_from_the_pins_source_what_it_lacks() -> None:
    async with prefill("source", **SHORT) as source, decode("holder", **SHORT) as holder, pins_at(holder) as pins:
        await pins.put(pin_of(), source.source)
        await pins.ready()
        assert holder.metric("computed_tokens_total") == 0
        assert source.metric("computed_tokens_total") == len(SYSTEM)
        assert source.metric("served_pages_total") == BLOCKS
        assert fetched(holder) == 0, "it is a pull that computes, not one from a peer's cache"
        assert holder.host.pool.hits(block_hashes_of(SYSTEM, BLOCK)) == BLOCKS


async def test_a_pin_whose_source_is_gone_is_computed_by_its_worker() -> None:
    async with decode("holder", **SHORT) as holder, pins_at(holder) as pins:
        gone = worker_pb2.PageSource(worker_id="gone", address="127.0.0.1:1", epoch="1.1")
        await pins.put(pin_of(), gone)
        await pins.ready()
        assert holder.metric("computed_tokens_total") == len(SYSTEM)


async def test_pins_that_share_blocks_count_them_once_and_removing_one_keeps_the_others() -> None:
    async with decode(**SHORT) as worker, pins_at(worker) as pins:
        await pins.put(pin_of())
        await pins.put(pin_of(owner="team-b"))
        await pins.put(pin_of((*SYSTEM, *range(BLOCK))))
        listed = await pins.listed()
        (use,) = listed.uses
        assert (len(listed.held), use.pages_pinned, use.most_pages) == (3, BLOCKS + 1, 16)
        assert await pins.remove(owner="ops") == 2
        await pins.ready()
        assert (await pins.listed()).uses[0].pages_pinned == BLOCKS


async def test_a_pin_that_the_caps_do_not_allow_is_refused_with_the_numbers() -> None:
    async with decode(**SHORT) as worker, pins_at(worker) as pins:
        await pins.put(pin_of())
        with pytest.raises(
            PinRefused, match=r"9 pages \(147,456 bytes\) more; pins keep 8 of 64 pages and may keep 16"
        ):
            await pins.put(pin_of(prompt_of(9 * BLOCK, seed=3)))
        with pytest.raises(PinRefused, match=r"8 pages \(131,072 bytes\), its own cap is 1,000 bytes"):
            await pins.put(pin_of(max_bytes=1000))
        await pins.ready()
        assert worker.metric("pin_refusals_total", reason="pin_cap", kind="pin") == 1
        assert worker.metric("pin_refusals_total", reason="max_bytes", kind="pin") == 1
        assert [held.pin_id for held in (await pins.listed()).held] == [pin_of().pin_id]


async def test_pins_never_take_the_pages_of_the_longest_request() -> None:
    model = paced().model_copy(update={"max_model_len": 1024})
    async with decode(model=model, pages=64) as worker, pins_at(worker) as pins:
        with pytest.raises(PinRefused, match="may keep 0: the longest request takes 64 and must always fit"):
            await pins.put(pin_of())


async def test_a_pin_waits_for_pages_that_are_in_use_and_is_computed_when_they_are_free() -> None:
    async with decode(**SHORT) as worker, pins_at(worker) as pins:
        pool = worker.host.pool
        used = [pool.claim_private() for _ in range(60)]
        assert (await pins.put(pin_of())).state == pins_pb2.PIN_STATE_COMPUTING
        await asyncio.sleep(0.05)
        assert (await pins.listed()).held[0].ready_blocks == 0
        pool.release(used)
        worker.host.loop.wake()
        await pins.ready()


async def test_pins_are_computed_one_at_a_time_so_that_a_request_comes_between_them() -> None:
    async with (
        decode(**small(prefill_tokens_per_s=2000)) as worker,
        router_to(worker) as router,
        pins_at(worker) as pins,
    ):
        many = [pin_of(prompt_of(2 * BLOCK, seed=seed)) for seed in range(20, 28)]
        for pin in many:
            await pins.put(pin)
            assert worker.host.scheduler.waiting + worker.host.scheduler.running <= 1
        prompt = prompt_of(5)
        assert (await router.answer(prompt, 1)).tokens == expected_tokens(prompt, 1)
        states = [held.state for held in (await pins.listed()).held]
        assert states.count(pins_pb2.PIN_STATE_COMPUTING) >= 2, "the request waited for at most one of them"
        assert len(await pins.ready()) == len(many)


async def test_a_pin_that_finds_the_queue_full_is_computed_later(monkeypatch) -> None:
    monkeypatch.setattr("twostroke.worker.pins.keeper.LOOK_S", 0.02)
    async with (
        decode(
            schedule=ScheduleConfig(max_num_seqs=1, max_waiting=1, max_num_batched_tokens=256), **small(step_ms=20)
        ) as worker,
        router_to(worker) as router,
        pins_at(worker) as pins,
    ):
        running = await router.open(prompt_of(4), 10, request_id="a")
        await eventually(lambda: worker.host.scheduler.running == 1)
        waiting = await router.open(prompt_of(5), 1, request_id="b")
        await pins.put(pin_of())
        await running.done.wait()
        await waiting.done.wait()
        await pins.ready()


async def test_a_pin_expires_and_its_blocks_are_cached_from_then_on() -> None:
    async with decode(**SHORT) as worker, pins_at(worker) as pins:
        await pins.put(pin_of(expires_s=time.time() + 0.2))
        await pins.ready()
        pool = worker.host.pool
        await eventually(lambda: not pool.pinned_blocks)
        assert (await pins.listed()).held == []
        assert pool.count(PageState.CACHED) == BLOCKS
        assert worker.metric("pin_expiries_total") == 1
        with pytest.raises(PinRefused, match="over already"):
            await pins.put(pin_of(expires_s=time.time() - 1))


async def test_a_pin_that_is_put_again_gets_the_new_end_and_keeps_its_hits() -> None:
    async with decode(**SHORT) as worker, router_to(worker) as router, pins_at(worker) as pins:
        await pins.put(pin_of(expires_s=time.time() + 0.3))
        await pins.ready()
        await router.answer(QUESTION, 1)
        await pins.put(pin_of(expires_s=None))
        await asyncio.sleep(0.4)
        (held,) = await pins.ready()
        assert (held.hits, held.HasField("expires_s")) == (1, False)


async def test_a_pin_that_is_removed_while_it_is_computed_holds_nothing() -> None:
    async with prefill(**small(prefill_tokens_per_s=2000)) as worker, pins_at(worker) as pins:
        held = await pins.put(pin_of())
        await eventually(lambda: worker.host.scheduler.running == 1)
        assert await pins.remove(pin_id=held.pin_id) == 1
        await worker.idle()
        assert worker.host.pool.pinned_blocks == 0


async def test_a_pin_that_is_removed_while_its_source_sends_it_is_pulled_no_further() -> None:
    plan = FaultPlan(every_transfer=Delay(60.0))
    async with (
        prefill("source", **SHORT) as source,
        decode("holder", plan=plan, **SHORT) as holder,
        pins_at(holder) as pins,
    ):
        held = await pins.put(pin_of(), source.source)
        await eventually(lambda: plan.pulls == 1)
        assert await pins.remove(pin_id=held.pin_id) == 1
        await eventually(lambda: holder.is_idle and source.is_idle, timeout_s=20.0)


async def test_forgotten_blocks_of_a_pin_are_computed_again(monkeypatch) -> None:
    monkeypatch.setattr("twostroke.worker.pins.keeper.LOOK_S", 0.02)
    async with decode(**SHORT) as worker, pins_at(worker) as pins:
        await pins.put(pin_of())
        await pins.ready()
        pool = worker.host.pool
        await eventually(lambda: pool.count(PageState.PINNED) == BLOCKS)
        pool.forget([pool.find(block_hash) for block_hash in block_hashes_of(SYSTEM, BLOCK)])
        assert pool.count(PageState.PINNED) == 0
        await eventually(lambda: pool.count(PageState.PINNED) == BLOCKS)


async def test_what_is_no_pin_of_this_worker_is_refused_naming_the_field() -> None:
    pin = pin_of()
    other = pin_of(prompt_of(3 * BLOCK, seed=5))
    async with prefill(**SHORT) as worker, pins_at(worker) as pins:
        for field, changes in (
            ("block_hashes", {"block_hashes": b""}),
            ("block_hashes", {"block_hashes": b"short"}),
            ("block_hashes", {"block_hashes": pin.block_hashes[0] * BLOCKS}),
            ("tokens", {"tokens": list(SYSTEM[:-1])}),
            ("tokens", {"tokens": [9999] * len(SYSTEM)}),
            ("expires_s", {"expires_s": float("nan")}),
            ("owner", {"owner": ""}),
            ("pin_id", {"owner": "another"}),
            ("pin_id", {"pin_id": other.pin_id}),
        ):
            with pytest.raises(InvalidRequest) as refused:
                await pins.put(pin, **changes)
            assert refused.value.field == field, changes
        with pytest.raises(InvalidRequest, match="the model serves 512"):
            await pins.put(pin_of(prompt_of(600 // BLOCK * BLOCK)))
        worker.host.validator.is_draining = True
        with pytest.raises(Draining):
            await pins.put(pin)
        assert (await pins.listed()).held == []


async def test_a_hint_keeps_the_blocks_of_its_request_for_its_tenant_within_a_cap() -> None:
    async with decode(**SHORT) as worker, router_to(worker) as router, pins_at(worker) as pins:

        async def ask(prompt: Sequence[int], blocks: int, seconds: float, name: str) -> None:
            message = router.message(prompt, 2, request_id=name, hint_tenant="shop")
            message.request.hints.add(blocks=blocks, seconds=seconds)
            got = await router.send(message)
            await got.done.wait()
            assert got.tokens == expected_tokens(prompt, 2)

        prompt = prompt_of(5 * BLOCK + 3)
        await ask(prompt, 4, 60.0, "a")
        (held,) = await pins.ready()
        assert (held.blocks, held.tenant, held.is_hint, held.hits) == (4, "shop", True, 0)
        without = await pins.listed(hints=False)
        assert (len(without.held), without.uses[0].hints) == (0, 1)
        await ask(prompt, 4, 0.5, "b")
        (held,) = await pins.ready()
        assert held.hits == 1
        assert held.expires_s > time.time() + 30, "a shorter wish does not shorten the first"
        await ask(prompt_of(4 * BLOCK, seed=4), 4, 60.0, "c")  # 4 + 4 of at most 6 pages
        assert len((await pins.listed()).held) == 1
        assert worker.metric("pin_refusals_total", reason="pin_tenant_cap", kind="hint") == 1
        await pins.remove(owner="")
        assert worker.host.pool.pinned_blocks == 0


async def test_a_repeated_hint_gets_a_later_end_once_that_is_a_share_of_its_time_later(caplog) -> None:
    caplog.set_level("INFO", "twostroke.worker.pins.keeper")
    async with decode(**SHORT) as worker, router_to(worker) as router, pins_at(worker) as pins:

        async def end_after(seconds: float, name: str) -> float:
            message = router.message(prompt_of(5 * BLOCK), 1, request_id=name)
            message.request.hints.add(blocks=4, seconds=seconds)
            await (await router.send(message)).done.wait()
            (held,) = await pins.ready()
            return held.expires_s - time.time()

        await end_after(1000.0, "a")
        assert await end_after(1050.0, "b") < 1000, "it would be a twentieth longer"
        assert 1150 < await end_after(1200.0, "c") < 1200
        (held,) = (await pins.listed()).held
        assert held.hits == 2
        assert caplog.text.count("pinned pin=") == 1
        assert worker.metric("pinned_pages") == 4
        await pins.remove(owner="")
        assert worker.host.pool.pinned_blocks == 0


async def test_a_hint_that_no_time_fits_is_refused_with_its_request() -> None:
    async with decode(**SHORT) as worker, router_to(worker) as router:
        for seconds in (0.0, -1.0, float("nan"), float("inf"), 1e6):
            message = router.message(SYSTEM, 2)
            message.request.hints.add(blocks=4, seconds=seconds)
            with pytest.raises(InvalidRequest) as refused:
                await router.send(message)
            assert refused.value.field == "cache_control.ttl"
        assert worker.host.pool.pinned_blocks == 0


async def test_requests_beside_pins_that_come_and_go_end_with_the_right_tokens() -> None:
    """A pool that is always short: requests preempt one another and pins, and wait for pages that pins keep."""
    chances = random.Random(5)
    prompts = [prompt_of(chances.randrange(20, 400), seed=seed % 7) for seed in range(40)]
    async with (
        prefill("source", **small(prefill_tokens_per_s=50_000)) as source,
        decode("holder", **small(prefill_tokens_per_s=50_000)) as holder,
        router_to(holder) as router,
        pins_at(holder) as at_holder,
        pins_at(source) as at_source,
    ):

        async def ask(number: int) -> None:
            prompt, name = prompts[number], str(number)
            message = router.message(prompt, 40, request_id=name, source=source if number % 3 else None)
            if number % 4 == 0:
                message.request.hints.add(blocks=chances.randrange(1, 20), seconds=chances.choice((0.01, 60.0)))
            got = await router.send(message)
            await got.done.wait()
            assert got.tokens == expected_tokens(prompt, 40), number

        async def pin_and_unpin(pins: Client, where: worker_pb2.PageSource | None) -> None:
            for _ in range(40):
                pin = pin_of(chances.choice(prompts)[: BLOCK * chances.randrange(1, 14)] or SYSTEM)
                with contextlib.suppress(PinRefused, InvalidRequest):
                    await pins.put(pin, where)
                await asyncio.sleep(0.01)
                if chances.random() < 0.7:
                    await pins.remove(pin_id=pin.pin_id)
                for each in (holder, source):
                    each.host.pool.check_integrity()

        async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
            tasks.create_task(pin_and_unpin(at_holder, source.source))
            tasks.create_task(pin_and_unpin(at_source, None))
            for number in range(len(prompts)):
                tasks.create_task(ask(number))
                await asyncio.sleep(0.01)
        assert holder.metric("preemptions_total") > 0
        await at_holder.ready()
        await at_source.ready()


async def test_a_new_epoch_of_a_worker_has_its_blocks_and_not_its_pins() -> None:
    async with decode(**SHORT) as worker, pins_at(worker) as pins:
        await pins.put(pin_of())
        await pins.ready()
        await eventually(lambda: worker.host.pool.count(PageState.PINNED) == BLOCKS)
        log = worker.host.engine_state.begin_epoch(Epoch.begin(2))
        Pins(worker.host)
        assert worker.host.pool.count(PageState.CACHED) == BLOCKS
        assert log.sequence == 1
        assert set(log.snapshot().stored) == set(block_hashes_of(SYSTEM, BLOCK))


async def test_forgetting_the_cache_leaves_pinned_blocks_with_their_pages_and_says_how_many() -> None:
    async with decode(**SHORT) as worker, pins_at(worker) as pins, router_to(worker) as router:
        await pins.put(pin_of())
        await pins.ready()
        await router.answer(tuple(range(5, 5 + 3 * BLOCK)), 2)
        await worker.idle()
        computed = worker.metric("computed_tokens_total")
        channel = PeerChannel(worker.info.address, TOKEN)
        control = control_pb2_grpc.ControlStub(channel.channel)
        answer = await control.ForgetCached(control_pb2.ForgetCachedRequest(), metadata=channel.metadata)
        await channel.close()
        assert (answer.blocks, answer.pinned) == (3, BLOCKS)
        pool = worker.host.pool
        assert (pool.count(PageState.PINNED), pool.count(PageState.CACHED)) == (BLOCKS, 0)
        assert pool.hits(block_hashes_of(SYSTEM, BLOCK)) == BLOCKS
        await pins.ready()
        assert worker.metric("computed_tokens_total") == computed, "a pinned block was computed again"
