"""Holds the pins that the fleet is to have, and says which worker is to hold which. It asks no worker."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from cluster.supervisor.actors import Serving
from cluster.supervisor.backend import MessageStore
from cluster.supervisor.stored import StoredMessages
from twostroke.base.errors import InvalidRequest, NotFound, PinRefused, ServeError
from twostroke.config import Role
from twostroke.kv_cache.block import HASH_BYTES
from twostroke.rpc.v1 import pins_pb2

log = logging.getLogger(__name__)

MOST_PINS = 256
MOST_TOKENS = 1 << 20
"""Tokens of all pins together: some megabytes in Ray's store."""
ALL = "all"
PIN_ID = re.compile(r"[0-9a-f]{1,32}")


class PinHolder(NamedTuple):
    """A worker of the fleet."""

    worker_id: str
    role: Role
    serving: Serving | None
    """None while it does not serve."""


def stored_pins(store: MessageStore) -> StoredMessages[pins_pb2.Pin]:
    """Returns the pins that are stored. A damaged one is not read.

    A worker computes the blocks of a pin from the tokens that the pin lists. Damaged tokens would be stored under the
    hashes of other tokens.
    """
    remedy = "`twostroke pin add` with the same prefix brings it back"
    return StoredMessages(store, "pin", pins_pb2.Pin, lambda pin: pin.pin_id, remedy)


@dataclass(frozen=True, slots=True)
class NewPin:
    """A pin that is given to its workers and not stored yet."""

    pin: pins_pb2.Pin
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once it is stored or given up."""


class WantedPins:
    def __init__(self, store: MessageStore) -> None:
        self._stored = stored_pins(store)
        self._pins = self._stored.kept()
        self._new_pins: dict[str, NewPin] = {}
        """Pins that workers may hold though they are not stored yet, by their ids."""

    def stored(self) -> list[pins_pb2.Pin]:
        return list(self._pins.values())

    def known(self, pin_id: str) -> pins_pb2.Pin | None:
        """Returns the stored pin of this id."""
        return self._pins.get(pin_id)

    def new(self) -> list[NewPin]:
        return list(self._new_pins.values())

    def at(self, pin_id: str, holder: PinHolder) -> pins_pb2.Pin | None:
        """Returns the pin of this id that a worker is to hold, or None."""
        new = self._new_pins.get(pin_id)
        pin = self._pins.get(pin_id) if new is None else new.pin
        return pin if pin is not None and lies_at(pin, holder) else None

    def ids_at(self, holder: PinHolder) -> set[str]:
        """Returns the ids of all pins that a worker is to hold, or may hold already."""
        pins = (*self._pins.values(), *(new.pin for new in self._new_pins.values()))
        return {pin.pin_id for pin in pins if lies_at(pin, holder)}

    async def until_ended(self, pin_id: str) -> None:
        """Waits until no pin of this id is being given."""
        while (earlier := self._new_pins.get(pin_id)) is not None:
            await earlier.ended.wait()

    @contextlib.contextmanager
    def wanting(self, pin: pins_pb2.Pin) -> Iterator[None]:
        """Lets workers hold a pin that is not stored yet."""
        new = self._new_pins[pin.pin_id] = NewPin(pin)
        try:
            yield
        finally:
            del self._new_pins[pin.pin_id]
            new.ended.set()

    def keep(self, pin: pins_pb2.Pin) -> None:
        """Stores a pin. Raises PeerLost where the store does not answer."""
        self._stored.keep(pin)
        self._pins[pin.pin_id] = pin

    def forget(self, pin_id: str) -> None:
        """Deletes a pin. Raises PeerLost where the store does not answer; the pin is remembered then."""
        self._stored.forget(pin_id)
        del self._pins[pin_id]

    def expire(self, now_s: float) -> None:
        """Forgets pins whose time is over at `now_s`, in Unix seconds. Workers end them by their own clocks."""
        for pin_id in [key for key, pin in self._pins.items() if pin.HasField("expires_s") and pin.expires_s <= now_s]:
            try:
                self.forget(pin_id)
            except ServeError as error:
                log.warning("expired pin not deleted pin=%s error=%s", pin_id, error.message)

    def check_room(self, pin: pins_pb2.Pin) -> None:
        """Raises InvalidRequest for what is not a pin, PinRefused where the fleet has too many."""
        if PIN_ID.fullmatch(pin.pin_id) is None or len(pin.block_hashes) < HASH_BYTES:
            raise InvalidRequest("a pin needs an id of hexadecimal digits, and a block", field="pin_id")
        all_pins = self._pins | {pin_id: new.pin for pin_id, new in self._new_pins.items()}
        others = [each for pin_id, each in all_pins.items() if pin_id != pin.pin_id]
        if len(others) >= MOST_PINS:
            raise PinRefused(f"the fleet has {len(others)} pins, and keeps at most {MOST_PINS}", field="pins")
        tokens = sum(len(each.tokens) for each in others)
        if tokens + len(pin.tokens) > MOST_TOKENS:
            raise PinRefused(
                f"the pin has {len(pin.tokens)} tokens; the fleet's pins have {tokens} and may have {MOST_TOKENS}",
                field="pins",
            )


def lies_at(pin: pins_pb2.Pin, holder: PinHolder) -> bool:
    return any(name in (ALL, holder.role.value, holder.worker_id) for name in pin.workers)


def choose_workers(request: pins_pb2.PutPinRequest, holders: Sequence[PinHolder]) -> None:
    """Writes into the pin where it is to lie. Raises InvalidRequest or NotFound for what is not a worker."""
    pin = request.pin
    if request.per_role:
        if pin.workers:
            raise InvalidRequest("name workers, or how many of each role, not both", field="workers")
        for role in (Role.PREFILL, Role.DECODE):
            pin.workers.extend([each.worker_id for each in holders if each.role is role][: request.per_role])
    if not pin.workers:
        pin.workers.append(ALL)
    known = {ALL, Role.PREFILL.value, Role.DECODE.value, *(each.worker_id for each in holders)}
    for name in pin.workers:
        if name not in known:
            raise NotFound(f"there is no worker {name!r}; there are {', '.join(sorted(known))}", field="workers")


def source_for(pin: pins_pb2.Pin, holder: PinHolder, serving: Sequence[PinHolder]) -> PinHolder | None:
    """Returns the one of the `serving` prefill workers that computes a pin for all of its decode workers."""
    if holder.role is Role.PREFILL:
        return None
    sources = [each for each in serving if each.role is Role.PREFILL]
    holding = [each for each in sources if lies_at(pin, each)] or sources
    return holding[int(pin.pin_id, 16) % len(holding)] if holding else None


def absent(pin: pins_pb2.Pin, worker_id: str, problem: str = "", unanswered: str = "") -> pins_pb2.HeldPin:
    """Describes a pin at a worker that does not hold it: it is away, did not answer or refused it (`problem`)."""
    return pins_pb2.HeldPin(
        worker_id=worker_id,
        pin_id=pin.pin_id,
        owner=pin.owner,
        tenant=pin.tenant,
        text=pin.text,
        state=pins_pb2.PIN_STATE_FAILED if problem else pins_pb2.PIN_STATE_AWAY,
        blocks=len(pin.block_hashes) // HASH_BYTES,
        expires_s=pin.expires_s if pin.HasField("expires_s") else None,
        problem=problem or (unanswered and f"it is given again and again, as the worker did not answer: {unanswered}"),
    )
