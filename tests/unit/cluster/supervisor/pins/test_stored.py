"""The store of pins: what is damaged is never used, and whoever dies between two steps leaves nothing behind."""

from __future__ import annotations

import logging

import pytest

from cluster.supervisor.pins import giving, service
from cluster.supervisor.pins.wanted import stored_pins
from tests.unit.cluster.supervisor.pins.test_service import fleet_of, pin_of
from twostroke.base.errors import PeerLost
from twostroke.rpc.v1 import pins_pb2


def damages(stored: bytes) -> dict[str, bytes]:
    """One byte after the other wrong, and every shorter length; by what was done."""
    flipped = {f"bit {at % 8} of byte {at}": _flipped(stored, at) for at in range(len(stored))}
    return flipped | {f"{length} bytes alone": stored[:length] for length in range(1, len(stored))}


def _flipped(stored: bytes, at: int) -> bytes:
    damaged = bytearray(stored)
    damaged[at] ^= 1 << (at % 8)
    return bytes(damaged)


async def test_a_stored_pin_with_any_damage_is_deleted_and_the_others_are_kept(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with fleet_of("decode-0") as fleet:
        await fleet.put(pin_of())
        await fleet.put(pin_of(5))
        damaged_id, good_id = pin_of().pin_id, pin_of(5).pin_id
        for what, damaged in damages(fleet.store.stored_pins[damaged_id]).items():
            fleet.store.stored_pins[damaged_id] = damaged
            caplog.clear()
            assert list(stored_pins(fleet.store).kept()) == [good_id], what
            assert list(fleet.store.stored_pins) == [good_id], what
            (warning,) = [each.message for each in caplog.records if each.levelno >= logging.WARNING]
            assert f"pin={damaged_id}" in warning, what
            assert "`twostroke pin add` with the same prefix brings it back" in warning, what
            assert "\n" not in warning


async def test_a_pin_under_the_id_of_another_is_damaged() -> None:
    async with fleet_of("decode-0") as fleet:
        await fleet.put(pin_of())
        fleet.store.stored_pins[pin_of(5).pin_id] = fleet.store.stored_pins.pop(pin_of().pin_id)
        assert stored_pins(fleet.store).kept() == {}


async def test_a_supervisor_that_dies_before_it_has_stored_a_pin_leaves_it_at_no_worker(monkeypatch) -> None:
    async with fleet_of("decode-0") as fleet:
        await fleet.put(pin_of(5))

        def die(*_: object) -> None:
            raise RuntimeError("the process dies here")

        monkeypatch.setattr(service, "reach", die)
        with pytest.raises(RuntimeError, match="dies here"):
            await fleet.put(pin_of())
        monkeypatch.undo()
        assert fleet.held_at() == {"decode-0": 2}
        fleet.pins = fleet.restarted()
        await fleet.pins.begun("decode-0")
        assert list(fleet.workers["decode-0"].held) == [pin_of(5).pin_id]


async def test_a_supervisor_that_dies_before_workers_know_of_a_removal_takes_the_pin_back_afterwards() -> None:
    async with fleet_of("decode-0", "decode-1") as fleet:
        await fleet.put(pin_of())
        fleet.store.store("pin", pin_of().pin_id, None)
        fleet.pins = fleet.restarted()
        for worker in fleet.workers:
            await fleet.pins.begun(worker)
        assert fleet.held_at() == {"decode-0": 0, "decode-1": 0}


async def test_a_worker_that_does_not_answer_while_a_pin_is_removed_loses_it_later(monkeypatch) -> None:
    monkeypatch.setattr(giving, "GIVE_AGAIN_S", 0.01)
    async with fleet_of("decode-0", "decode-1") as fleet:
        await fleet.put(pin_of())
        silent = fleet.workers["decode-1"]
        silent.refusal = PeerLost("it is busy")
        assert await fleet.remove(pin_id=pin_of().pin_id) == 1
        assert fleet.held_at() == {"decode-0": 0, "decode-1": 1}
        silent.refusal = None
        await fleet.until_held("decode-1", 0)


async def test_a_store_that_does_not_answer_refuses_a_new_pin_and_keeps_an_old_one() -> None:
    async with fleet_of("decode-0") as fleet:
        await fleet.put(pin_of(expires_s=fleet.now_s + 10))
        fleet.store.store_error = PeerLost("Ray's store of pins does not answer")
        with pytest.raises(PeerLost, match="store of pins"):
            await fleet.put(pin_of(5))
        assert list(fleet.workers["decode-0"].held) == [pin_of().pin_id]
        with pytest.raises(PeerLost, match="store of pins"):
            await fleet.remove(pin_id=pin_of().pin_id)
        assert await fleet.listed() == {"decode-0": pins_pb2.PIN_STATE_READY}
        fleet.now_s += 20
        assert await fleet.listed() == {"decode-0": pins_pb2.PIN_STATE_READY}, "its worker ends it by its own clock"
        fleet.store.store_error = None
        await fleet.listed()
        assert fleet.store.stored_pins == {}
