"""Pins that are put and removed while processes break: afterwards all of their workers hold a pin, or none does."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time

from tests.trials.chaos.faults.testbed import ANSWER_S, POLL_S, Bed
from twostroke.base.errors import ServeError
from twostroke.rpc.v1 import pins_pb2, pins_pb2_grpc

OWNER = "faults"
LETTERS = 200
"""Letters of a prefix, which are as many tokens of a paced model: twelve blocks, of the sixteen that pins may keep."""
READY_S = 2.0
"""Time for a pin to be computed before the load goes on."""


async def put(bed: Bed, draws: random.Random) -> None:
    """Puts a pin on all workers instead of the last one, and gives it time to be computed. Raises ServeError."""
    await remove(bed)
    text = "".join(draws.choices("abcdefghijklmnopqrstuvwxyz ", k=LETTERS))
    async with bed.channel(draws.choice(bed.routers).admin) as channel:
        await pins_pb2_grpc.PinAdminStub(channel.channel).Add(
            pins_pb2.AddPinRequest(owner=OWNER, text=text), metadata=channel.metadata, timeout=ANSWER_S
        )
    await agreed_within(bed, READY_S)


async def remove(bed: Bed) -> None:
    """Raises ServeError."""
    async with bed.channel(await bed.fleet_address()) as channel:
        await pins_pb2_grpc.PinsStub(channel.channel).Remove(
            pins_pb2.RemovePinRequest(owner=OWNER), metadata=channel.metadata, timeout=ANSWER_S
        )


async def agreed_within(bed: Bed, seconds: float) -> str | None:
    """None as soon as every pin is ready at all workers; what still is wrong after so long."""
    if not bed.has_supervisor:
        return None
    wrong: str | None = "nobody has answered"
    give_up_s = time.monotonic() + seconds
    while True:
        with contextlib.suppress(ServeError):  # whoever is asked may be the one that breaks
            wrong = _disagreement(await _listed(bed), bed.workers)
        if wrong is None or time.monotonic() > give_up_s:
            return wrong
        await asyncio.sleep(POLL_S)  # other processes have no events here


async def _listed(bed: Bed) -> pins_pb2.ListPinsResponse:
    async with bed.channel(await bed.fleet_address()) as channel:
        return await pins_pb2_grpc.PinsStub(channel.channel).List(
            pins_pb2.ListPinsRequest(), metadata=channel.metadata, timeout=ANSWER_S
        )


def _disagreement(listed: pins_pb2.ListPinsResponse, workers: int) -> str | None:
    """Says which pin is not ready everywhere, or which worker keeps pages for none."""
    by_pin: dict[str, dict[str, pins_pb2.HeldPin]] = {}
    for held in listed.held:
        by_pin.setdefault(held.pin_id, {})[held.worker_id] = held
    for pin_id, holders in by_pin.items():
        if len(holders) < workers:
            return f"pin {pin_id} is held by {', '.join(sorted(holders))} alone"
        for worker_id, held in holders.items():
            if held.state != pins_pb2.PIN_STATE_READY:
                return f"pin {pin_id} at {worker_id}: {pins_pb2.PinState.Name(held.state)} {held.problem}".rstrip()
    if len(listed.uses) < workers:
        return f"only {', '.join(sorted(use.worker_id for use in listed.uses))} say which pins they hold"
    if not by_pin:
        return next(
            (f"{use.worker_id} keeps {use.pages_pinned} pages" for use in listed.uses if use.pages_pinned), None
        )
    return None
