"""Pins of a fleet: held by all of their workers or by none, remembered, and given to every epoch."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest

from cluster.supervisor.actors import Serving
from cluster.supervisor.pins import giving, service, wanted
from cluster.supervisor.pins.service import FleetPins
from cluster.supervisor.pins.wanted import PinHolder
from tests.unit.cluster.fake_backend import TOKEN, FakeBackend, running, until
from twostroke.base.errors import InvalidRequest, NotFound, PeerLost, PinRefused, ServeError
from twostroke.config import Role
from twostroke.kv_cache.block import block_hashes_of
from twostroke.kv_cache.pins.pin_table import Pin, pin_id_of
from twostroke.rpc.channel import PeerChannel
from twostroke.rpc.membership import Membership
from twostroke.rpc.pins import pin_to_message
from twostroke.rpc.server import RpcServer
from twostroke.rpc.v1 import pins_pb2, pins_pb2_grpc


@dataclass
class Worker(pins_pb2_grpc.PinsServicer):
    """A worker that holds every pin, or refuses each."""

    worker_id: str
    address: str = ""
    epoch: str = "1.0000000000000001"
    refusal: ServeError | None = None
    going_on: asyncio.Event | None = None
    """Set once it may answer."""
    held: dict[str, pins_pb2.PutPinRequest] = field(default_factory=dict)
    puts: int = 0
    """Pins that it was given, held or not."""

    async def until_asked(self) -> None:
        """Waits until it is given a pin."""
        puts = self.puts
        async with asyncio.timeout(60):
            while self.puts == puts:
                await asyncio.sleep(0.005)

    async def Put(self, request: pins_pb2.PutPinRequest, context: object) -> pins_pb2.PutPinResponse:  # noqa: N802
        self.puts += 1
        if self.going_on is not None:
            await self.going_on.wait()
        if self.refusal is not None:
            raise self.refusal
        self.held[request.pin.pin_id] = request
        return pins_pb2.PutPinResponse(held=[self._one(request.pin)])

    async def Remove(self, request: pins_pb2.RemovePinRequest, context: object) -> pins_pb2.RemovePinResponse:  # noqa: N802
        if isinstance(self.refusal, PeerLost):
            raise self.refusal
        gone = [
            pin_id
            for pin_id, each in self.held.items()
            if pin_id == request.pin_id or (not request.pin_id and each.pin.owner == request.owner)
        ]
        for pin_id in gone:
            del self.held[pin_id]
        return pins_pb2.RemovePinResponse(removed=len(gone))

    async def List(self, request: pins_pb2.ListPinsRequest, context: object) -> pins_pb2.ListPinsResponse:  # noqa: N802
        use = pins_pb2.PinUse(worker_id=self.worker_id, pages_pinned=len(self.held))
        held = [self._one(each.pin) for each in self.held.values()]
        hint = pins_pb2.HeldPin(worker_id=self.worker_id, is_hint=True)
        return pins_pb2.ListPinsResponse(held=held + [hint] * (2 * request.hints), uses=[use])

    def _one(self, pin: pins_pb2.Pin) -> pins_pb2.HeldPin:
        return pins_pb2.HeldPin(
            worker_id=self.worker_id, pin_id=pin.pin_id, state=pins_pb2.PIN_STATE_READY, owner=pin.owner
        )


class Fleet:
    """Workers with pins, and the supervisor's memory of them."""

    def __init__(self, workers: dict[str, Worker]) -> None:
        self.workers = workers
        self.away: set[str] = set()
        self.store = FakeBackend()
        self.now_s = 1000.0
        self.pins = self.restarted()

    def restarted(self) -> FleetPins:
        """What a restarted supervisor has."""
        return FleetPins(self.holders, self.store, Membership.of(TOKEN, None), lambda: self.now_s)

    def holders(self) -> list[PinHolder]:
        return [
            PinHolder(name, Role(name.partition("-")[0]), None if name in self.away else _serving(worker))
            for name, worker in self.workers.items()
        ]

    async def put(self, pin: Pin, *workers: str, per_role: int = 0) -> list[pins_pb2.HeldPin]:
        request = pins_pb2.PutPinRequest(pin=pin_to_message(pin, "fingerprint", workers), per_role=per_role)
        return list((await self.pins.Put(request, None)).held)

    async def remove(self, **which: str) -> int:
        return (await self.pins.Remove(pins_pb2.RemovePinRequest(**which), None)).removed

    async def listed(self) -> dict[str, int]:
        """States of the pins, by worker."""
        listed = await self.pins.List(pins_pb2.ListPinsRequest(), None)
        return {held.worker_id: held.state for held in listed.held}

    async def until_held(self, worker_id: str, count: int) -> None:
        async with asyncio.timeout(60):
            while len(self.workers[worker_id].held) != count:
                await asyncio.sleep(0.005)

    def held_at(self) -> dict[str, int]:
        return {name: len(worker.held) for name, worker in self.workers.items()}


def _serving(worker: Worker) -> Serving:
    role = Role(worker.worker_id.partition("-")[0])
    return Serving(worker.address, worker.epoch, "fingerprint", "metrics:1", role)


@contextlib.asynccontextmanager
async def fleet_of(*names: str) -> AsyncIterator[Fleet]:
    async with contextlib.AsyncExitStack() as stack:
        workers = {}
        for name in names or ("prefill-0", "decode-0", "decode-1"):
            worker, server = Worker(name), RpcServer("127.0.0.1", 0, token=TOKEN)
            pins_pb2_grpc.add_PinsServicer_to_server(worker, server.server)
            await server.start()
            stack.push_async_callback(server.stop, 0)
            worker.address = server.address
            workers[name] = worker
        fleet = Fleet(workers)
        try:
            yield fleet
        finally:
            await fleet.pins.stop()


def pin_of(first: int = 0, blocks: int = 2, owner: str = "ops", expires_s: float | None = None) -> Pin:
    tokens = tuple(range(first, first + blocks * 16))
    hashes = tuple(block_hashes_of(tokens, 16))
    pin_id = pin_id_of(owner, "", hashes[-1])
    return Pin(pin_id=pin_id, owner=owner, tokens=tokens, block_hashes=hashes, expires_s=expires_s)


@pytest.mark.parametrize(
    ("workers", "per_role", "where"),
    [
        ((), 0, {"prefill-0", "decode-0", "decode-1"}),
        (("all",), 0, {"prefill-0", "decode-0", "decode-1"}),
        (("decode",), 0, {"decode-0", "decode-1"}),
        (("prefill", "decode-1"), 0, {"prefill-0", "decode-1"}),
        ((), 1, {"prefill-0", "decode-0"}),
    ],
)
async def test_a_pin_lies_where_it_is_wanted(workers: tuple[str, ...], per_role: int, where: set[str]) -> None:
    async with fleet_of() as fleet:
        held = await fleet.put(pin_of(), *workers, per_role=per_role)
        assert {each.worker_id for each in held} == where
        assert {name for name, count in fleet.held_at().items() if count} == where


async def test_decode_workers_pull_a_pin_from_a_prefill_worker_and_prefill_workers_compute_it() -> None:
    async with fleet_of() as fleet:
        await fleet.put(pin_of())
        (given,) = fleet.workers["decode-0"].held.values()
        assert given.source.worker_id == "prefill-0"
        assert given.source.epoch == fleet.workers["prefill-0"].epoch
        assert not next(iter(fleet.workers["prefill-0"].held.values())).HasField("source")
        fleet.away.add("prefill-0")
        await fleet.put(pin_of(7))
        assert not fleet.workers["decode-0"].held[pin_of(7).pin_id].HasField("source")


async def test_a_pin_that_one_worker_refuses_is_held_by_none_and_the_refusal_names_it() -> None:
    async with fleet_of() as fleet:
        await fleet.put(pin_of(), "decode")
        fleet.workers["decode-1"].refusal = PinRefused("3 of 4 pages", field="pin_cap")
        with pytest.raises(PinRefused, match="decode-1: 3 of 4 pages"):
            await fleet.put(pin_of(5))
        assert fleet.held_at() == {"prefill-0": 0, "decode-0": 1, "decode-1": 1}
        assert list(fleet.store.stored_pins) == [pin_of().pin_id]
        with pytest.raises(PinRefused):
            await fleet.put(pin_of(), "all")  # the same again, elsewhere
        assert fleet.held_at() == {"prefill-0": 0, "decode-0": 1, "decode-1": 1}


async def test_a_worker_that_is_away_gets_its_pins_when_it_serves() -> None:
    async with fleet_of() as fleet:
        fleet.away.add("decode-1")
        held = {each.worker_id: each.state for each in await fleet.put(pin_of())}
        assert held["decode-1"] == pins_pb2.PIN_STATE_AWAY
        assert (await fleet.listed())["decode-1"] == pins_pb2.PIN_STATE_AWAY
        fleet.away.clear()
        await fleet.pins.begun("decode-1")
        assert set((await fleet.listed()).values()) == {pins_pb2.PIN_STATE_READY}


async def test_a_worker_that_does_not_answer_is_tried_again_for_as_long_as_its_epoch_serves(monkeypatch) -> None:
    monkeypatch.setattr(giving, "GIVE_AGAIN_S", 0.01)
    async with fleet_of() as fleet:
        await fleet.put(pin_of(), "decode-0")
        worker = fleet.workers["decode-0"]
        worker.held.clear()
        worker.refusal = PeerLost("not yet")
        given_again = asyncio.create_task(fleet.pins.begun("decode-0"))
        await asyncio.sleep(0.05)
        assert not given_again.done()
        worker.refusal = None
        await given_again
        assert len(worker.held) == 1
        worker.refusal = PeerLost("never")
        given_again = asyncio.create_task(fleet.pins.begun("decode-0"))
        await asyncio.sleep(0.03)
        worker.epoch = "2.0000000000000001"
        await asyncio.wait_for(given_again, 60)


async def test_a_serving_worker_that_does_not_answer_a_new_pin_is_given_it_in_the_same_epoch(monkeypatch) -> None:
    monkeypatch.setattr(giving, "GIVE_AGAIN_S", 0.01)
    async with fleet_of() as fleet:
        silent = fleet.workers["decode-1"]
        silent.refusal = PeerLost("it is busy")
        held = {each.worker_id: each for each in await fleet.put(pin_of())}
        assert held["decode-0"].state == pins_pb2.PIN_STATE_READY
        assert held["decode-1"].state == pins_pb2.PIN_STATE_AWAY
        assert "given again and again" in held["decode-1"].problem
        assert "it is busy" in held["decode-1"].problem
        await asyncio.sleep(0.05)
        assert (await fleet.listed())["decode-1"] == pins_pb2.PIN_STATE_AWAY
        silent.refusal = None
        await fleet.until_held("decode-1", 1)
        assert set((await fleet.listed()).values()) == {pins_pb2.PIN_STATE_READY}


async def test_a_worker_that_does_not_answer_while_a_pin_is_undone_loses_it_later(monkeypatch) -> None:
    monkeypatch.setattr(giving, "GIVE_AGAIN_S", 0.01)
    async with fleet_of("decode-0", "decode-1") as fleet:
        refuses, silent = fleet.workers.values()
        refuses.refusal = PinRefused("3 of 4 pages", field="pin_cap")
        refuses.going_on = asyncio.Event()
        putting = asyncio.create_task(fleet.put(pin_of()))
        await fleet.until_held("decode-1", 1)
        silent.refusal = PeerLost("it is busy")
        await asyncio.sleep(0.05)  # its answer is here
        refuses.going_on.set()
        with pytest.raises(PinRefused, match="decode-0: 3 of 4 pages"):
            await putting
        assert fleet.held_at() == {"decode-0": 0, "decode-1": 1}
        silent.refusal = None
        await fleet.until_held("decode-1", 0)


async def test_a_new_epoch_is_given_a_pin_again_though_an_earlier_epoch_still_waits_for_its_turn(monkeypatch) -> None:
    monkeypatch.setattr(giving, "GIVE_AGAIN_S", 0.3)
    async with fleet_of("decode-0") as fleet:
        worker = fleet.workers["decode-0"]
        worker.refusal = PeerLost("it is busy")
        await fleet.put(pin_of())
        worker.epoch, worker.refusal = "2.0000000000000002", None
        await fleet.pins.begun("decode-0")
        assert fleet.held_at() == {"decode-0": 1}
        worker.refusal = PeerLost("it is busy")
        await fleet.put(pin_of(5))
        worker.refusal = None
        await fleet.until_held("decode-0", 2)


@pytest.mark.parametrize("refusal", [None, PinRefused("3 of 4 pages", field="pin_cap")])
async def test_a_put_whose_caller_goes_away_is_carried_out_or_undone_as_a_whole(refusal: ServeError | None) -> None:
    async with fleet_of("decode-0", "decode-1") as fleet:
        slow = fleet.workers["decode-1"]
        slow.refusal, slow.going_on = refusal, asyncio.Event()
        putting = asyncio.create_task(fleet.put(pin_of()))
        await fleet.until_held("decode-0", 1)
        putting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await putting
        slow.going_on.set()
        expected = 0 if refusal is not None else 1
        for name in fleet.workers:
            await fleet.until_held(name, expected)
        async with asyncio.timeout(60):
            while len(fleet.store.stored_pins) != expected:
                await asyncio.sleep(0.005)


async def test_a_worker_that_does_not_answer_keeps_no_other_worker_and_no_other_pin_waiting(monkeypatch) -> None:
    monkeypatch.setattr(giving, "CALL_S", 30)
    async with fleet_of() as fleet, asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        frozen = fleet.workers["decode-1"]
        frozen.going_on = asyncio.Event()
        putting = tasks.create_task(fleet.put(pin_of()))
        await fleet.until_held("decode-0", 1)
        given_again = tasks.create_task(fleet.pins.begun("decode-1"))
        await fleet.put(pin_of(5), "decode-0")
        fleet.workers["decode-0"].held.clear()
        await fleet.pins.begun("decode-0")
        assert set(fleet.workers["decode-0"].held) == {pin_of().pin_id, pin_of(5).pin_id}
        removing = tasks.create_task(fleet.remove(pin_id=pin_of(5).pin_id))
        await fleet.until_held("decode-0", 1)
        assert list(fleet.store.stored_pins) == []
        assert not any(task.done() for task in (putting, given_again, removing))
        frozen.going_on.set()
    assert fleet.held_at() == {"prefill-0": 1, "decode-0": 1, "decode-1": 1}
    assert list(fleet.store.stored_pins) == [pin_of().pin_id]


async def test_a_pin_that_is_removed_while_a_worker_is_given_its_pins_is_not_given_to_it() -> None:
    async with fleet_of("decode-0") as fleet, asyncio.timeout(60):
        for first in range(3):
            await fleet.put(pin_of(first))
        worker = fleet.workers["decode-0"]
        worker.held.clear()
        worker.going_on = asyncio.Event()
        given_again = asyncio.create_task(fleet.pins.begun("decode-0"))
        await worker.until_asked()
        removing = [asyncio.create_task(fleet.remove(pin_id=pin_of(first).pin_id)) for first in range(3)]
        while fleet.store.stored_pins:
            await asyncio.sleep(0.005)
        worker.going_on.set()
        assert await asyncio.gather(*removing) == [1, 1, 1]
        await given_again
        assert fleet.held_at() == {"decode-0": 0}
        assert worker.puts == 4, "three, and the one that was under way"


async def test_a_worker_that_is_given_its_pins_keeps_one_that_others_have_not_answered_yet() -> None:
    async with fleet_of("decode-0", "decode-1") as fleet, asyncio.timeout(60):
        slow = fleet.workers["decode-1"]
        slow.going_on = asyncio.Event()
        putting = asyncio.create_task(fleet.put(pin_of()))
        await fleet.until_held("decode-0", 1)
        await fleet.pins.begun("decode-0")
        assert not putting.done()
        slow.going_on.set()
        await putting
        assert fleet.held_at() == {"decode-0": 1, "decode-1": 1}


async def test_a_pin_that_comes_while_a_busy_worker_is_given_others_is_given_to_it_later(monkeypatch) -> None:
    monkeypatch.setattr(giving, "GIVE_AGAIN_S", 0.01)
    async with fleet_of("decode-0") as fleet, asyncio.timeout(60):
        worker = fleet.workers["decode-0"]
        worker.refusal = PeerLost("it is busy")
        await fleet.put(pin_of())
        worker.refusal, worker.going_on = None, asyncio.Event()
        await worker.until_asked()  # it is given the first one now
        monkeypatch.setattr(giving, "CALL_S", 0.05)
        (held,) = await fleet.put(pin_of(5))
        assert "earlier calls to decode-0 take more than 0.05 s" in held.problem
        monkeypatch.setattr(giving, "CALL_S", 5)
        worker.going_on.set()
        await fleet.until_held("decode-0", 2)


async def test_a_pin_that_is_put_or_removed_while_it_is_put_already_is_changed_afterwards() -> None:
    async with fleet_of("decode-0", "decode-1") as fleet, asyncio.timeout(60):
        slow = fleet.workers["decode-1"]
        slow.going_on = asyncio.Event()
        first = asyncio.create_task(fleet.put(pin_of(), "all"))
        await fleet.until_held("decode-0", 1)
        second = asyncio.create_task(fleet.put(pin_of(), "decode-1"))
        await asyncio.sleep(0.05)
        assert fleet.held_at() == {"decode-0": 1, "decode-1": 0}
        slow.going_on.set()
        assert len(await first) == 2
        assert len(await second) == 1
        assert fleet.held_at() == {"decode-0": 0, "decode-1": 1}
        slow.going_on = asyncio.Event()
        third = asyncio.create_task(fleet.put(pin_of(), "all"))
        await fleet.until_held("decode-0", 1)
        removing = asyncio.create_task(fleet.remove(owner="ops"))
        await asyncio.sleep(0.05)
        assert not removing.done()
        slow.going_on.set()
        await third
        assert await removing == 1
        assert fleet.held_at() == {"decode-0": 0, "decode-1": 0}
        assert fleet.store.stored_pins == {}


async def test_removing_an_owners_pins_takes_those_that_only_workers_have_and_no_others() -> None:
    async with fleet_of("decode-0") as fleet:
        await fleet.put(pin_of(owner="team"))
        await fleet.put(pin_of(5))
        fleet.store.stored_pins.pop(pin_of(owner="team").pin_id)
        fleet.pins = fleet.restarted()
        assert await fleet.remove(owner="team") == 1
        assert list(fleet.workers["decode-0"].held) == [pin_of(5).pin_id]


async def test_hints_are_listed_where_they_are_asked_for_and_not_more_than_fit(monkeypatch) -> None:
    monkeypatch.setattr(service, "MOST_LISTED_HINTS", 3)
    async with fleet_of("decode-0", "decode-1") as fleet:
        await fleet.put(pin_of())
        for asked, expected in ((False, 0), (True, 3)):
            listed = await fleet.pins.List(pins_pb2.ListPinsRequest(hints=asked), None)
            assert sum(held.is_hint for held in listed.held) == expected
            assert [held.pin_id for held in listed.held if not held.is_hint] == [pin_of().pin_id] * 2
            assert len(listed.uses) == 2


async def test_a_restarted_worker_that_refuses_its_pin_is_shown_with_the_reason() -> None:
    async with fleet_of() as fleet:
        await fleet.put(pin_of(), "decode-0")
        worker = fleet.workers["decode-0"]
        worker.held.clear()
        worker.refusal = PinRefused("3 of 4 pages", field="pin_cap")
        await fleet.pins.begun("decode-0")
        (held,) = (await fleet.pins.List(pins_pb2.ListPinsRequest(), None)).held
        assert (held.state, held.problem) == (pins_pb2.PIN_STATE_FAILED, "3 of 4 pages")


async def test_a_restarted_supervisor_remembers_the_pins_that_have_not_expired() -> None:
    async with fleet_of() as fleet:
        await fleet.put(pin_of(expires_s=fleet.now_s + 10))
        await fleet.put(pin_of(5))
        for worker in fleet.workers.values():
            worker.held.clear()
        fleet.now_s += 20
        fleet.pins = fleet.restarted()
        await fleet.pins.begun("decode-0")
        assert list(fleet.workers["decode-0"].held) == [pin_of(5).pin_id]
        assert list(fleet.store.stored_pins) == [pin_of(5).pin_id]


async def test_removing_is_by_id_or_owner_and_twice_is_no_error() -> None:
    async with fleet_of() as fleet:
        await fleet.put(pin_of())
        await fleet.put(pin_of(owner="team"))
        await fleet.put(pin_of(5, owner="team"))
        assert await fleet.remove(pin_id=pin_of().pin_id) == 1
        assert await fleet.remove(pin_id=pin_of().pin_id) == 0
        assert await fleet.remove(owner="team") == 2
        assert await fleet.remove(owner="team") == 0
        assert fleet.held_at() == {"prefill-0": 0, "decode-0": 0, "decode-1": 0}
        assert fleet.store.stored_pins == {}


async def test_a_pin_that_is_put_again_leaves_the_workers_that_are_not_to_hold_it_any_more() -> None:
    async with fleet_of() as fleet:
        await fleet.put(pin_of(), "all")
        await fleet.put(pin_of(), "decode-1")
        assert fleet.held_at() == {"prefill-0": 0, "decode-0": 0, "decode-1": 1}


async def test_pins_are_bounded_in_number_and_tokens(monkeypatch) -> None:
    async with fleet_of() as fleet:
        monkeypatch.setattr(wanted, "MOST_PINS", 1)
        await fleet.put(pin_of())
        await fleet.put(pin_of())
        with pytest.raises(PinRefused, match="has 1 pins, and keeps at most 1"):
            await fleet.put(pin_of(5))
        monkeypatch.setattr(wanted, "MOST_TOKENS", 60)
        monkeypatch.setattr(wanted, "MOST_PINS", 9)
        with pytest.raises(PinRefused, match="has 32 tokens; the fleet's pins have 32 and may have 60"):
            await fleet.put(pin_of(5))


async def test_workers_that_are_not_there_and_pins_that_are_none_are_refused() -> None:
    async with fleet_of() as fleet:
        with pytest.raises(NotFound, match="there is no worker 'decode-9'; there are all, decode, decode-0"):
            await fleet.put(pin_of(), "decode-9")
        with pytest.raises(InvalidRequest, match="not both"):
            await fleet.put(pin_of(), "decode-0", per_role=1)
        with pytest.raises(InvalidRequest, match="needs an id of hexadecimal digits, and a block"):
            await fleet.pins.Put(pins_pb2.PutPinRequest(), None)
        assert fleet.store.stored_pins == {}


async def test_a_supervisor_gives_every_new_epoch_its_pins() -> None:
    backend = FakeBackend()
    async with fleet_of("decode-0") as fleet:
        backend.control.address = fleet.workers["decode-0"].address
        async with running(backend) as supervisor:
            await until(supervisor, "serving")
            channel = PeerChannel(await supervisor.address(), TOKEN)
            put = pins_pb2.PutPinRequest(pin=pin_to_message(pin_of(), "fingerprint", ("decode-0",)))
            await channel.call(pins_pb2_grpc.PinsStub(channel.channel).Put, put, 5)
            await channel.close()
            held = fleet.workers["decode-0"].held
            assert list(held) == [pin_of().pin_id]
            held.clear()
            backend.workers["decode-0"].die(PeerLost("killed"))
            async with asyncio.timeout(60):
                while not held:
                    await asyncio.sleep(0.01)
            assert list(backend.stored_pins) == [pin_of().pin_id]
