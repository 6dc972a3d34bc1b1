"""Pins of one worker: leases on blocks with an owner, an end, and statistics of their hits.

A pin keeps the blocks of one prefix in the pool (see `BlockPool.pin`). It is refused, with the numbers, where the caps
do not allow it: nothing that is in use makes room for a pin. Blocks that several pins share take their pages once.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from twostroke.base.errors import PinRefused
from twostroke.base.ids import BlockHash, PinId
from twostroke.kv_cache.pool import BlockPool
from twostroke.request import WeightsRef

Key = TypeVar("Key")

MOST_PINS = 1024
"""Most pins of one worker, cache hints included: each takes a few hundred bytes, and as many again per block."""
MOST_HINTS = 768
"""Number of pins at which a worker takes no more hints: clients leave room for all pins that a supervisor keeps."""
MOST_TENANT_HINTS = 64
"""Most hints of one tenant at one worker: it takes twelve tenants to reach `MOST_HINTS`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """A lease on the blocks of one prefix."""

    pin_id: PinId
    owner: str
    tenant: str = ""
    """Tenant whose requests it serves; empty: requests without a tenant."""
    tokens: tuple[int, ...]
    """Tokens of the pinned prefix, which fill its blocks exactly."""
    block_hashes: tuple[BlockHash, ...]
    expires_s: float | None = None
    """Unix seconds; None: it stays until it is removed."""
    max_bytes: int = 0
    """Most bytes that its blocks may take at one worker; 0: whatever the caps allow."""
    text: str = ""
    """Beginning of the prefix as text, for people."""
    weights: WeightsRef | None = None
    """Weights besides the model's with which its blocks are computed; None: the model's alone."""
    is_hint: bool = False
    """Whether a request asked for it. Then the worker computes its blocks only for that request, never for the pin."""

    def has_expired(self, now_s: float) -> bool:
        return self.expires_s is not None and self.expires_s <= now_s


def pin_id_of(owner: str, tenant: str, last_block: BlockHash) -> PinId:
    """Returns the id of an owner's pin on the prefix that ends with `last_block`. Names are hashed with lengths."""
    names = b"".join(len(name).to_bytes(4, "little") + name for name in (owner.encode(), tenant.encode()))
    return PinId(hashlib.blake2b(names + last_block, digest_size=8).hexdigest())


@dataclass(frozen=True, slots=True)
class PinLimits:
    """What pins may take of a pool, in blocks."""

    total: int
    """Pages of the pool."""
    page_bytes: int
    share: int
    """Blocks that `--pin-cap` allows."""
    tenant: int
    """Blocks that the hints of one tenant may keep."""
    longest_request: int
    """Pages of the longest request that the worker takes: pins never leave less, or it would wait for ever."""

    @classmethod
    def of(cls, total: int, page_bytes: int, longest_request: int, *, share: float, tenant_share: float) -> PinLimits:
        return cls(total, page_bytes, math.floor(share * total), math.floor(tenant_share * total), longest_request)

    @property
    def most(self) -> int:
        """Distinct blocks that pins may keep."""
        return max(0, min(self.share, self.total - self.longest_request))

    def size(self, blocks: int) -> str:
        return f"{blocks} pages ({blocks * self.page_bytes:,} bytes)"


@dataclass(slots=True)
class PinHits:
    """Admissions that found all of a pin's blocks."""

    hits: int = 0
    saved_s: float = 0.0
    """Predicted seconds of computing that they spared."""


class PinTable:
    """All pins of one worker. One owner, one thread: the worker's event loop."""

    def __init__(self, pool: BlockPool, limits: PinLimits) -> None:
        self._pool = pool
        self.limits = limits
        self.by_id: dict[PinId, Pin] = {}
        """Pins by id, the oldest first. Only this table changes the dictionary."""
        self._hits: dict[PinId, PinHits] = {}
        self._by_last: dict[BlockHash, dict[PinId, None]] = {}
        """Pins by their last block."""
        self._hinted: dict[str, Counter[BlockHash]] = {}
        """Hints per block, by tenant."""
        self._hints = Counter[str]()
        """Hints by tenant."""

    def __len__(self) -> int:
        return len(self.by_id)

    @property
    def pinned_blocks(self) -> int:
        """Distinct blocks that the pins keep, whether or not they are here."""
        return self._pool.pinned_blocks

    @property
    def hints(self) -> int:
        """Pins that requests asked for."""
        return self._hints.total()

    @property
    def pins(self) -> list[Pin]:
        """All pins, the oldest first."""
        return list(self.by_id.values())

    def get(self, pin_id: PinId) -> Pin | None:
        return self.by_id.get(pin_id)

    def hits(self, pin_id: PinId) -> PinHits:
        return self._hits[pin_id]

    @property
    def next_end_s(self) -> float | None:
        """When the next pin expires, in Unix seconds."""
        return min((pin.expires_s for pin in self.by_id.values() if pin.expires_s is not None), default=None)

    def put(self, pin: Pin, now_s: float) -> list[Pin]:
        """Adds a pin. A pin with the same id is replaced, and its hits are kept.

        Where room is needed for a pin that is not a hint, the hints that end soonest are removed and returned. Raises
        PinRefused; then nothing has changed.
        """
        known = self.by_id.get(pin.pin_id)
        ended = self._check(pin, known, now_s)
        for hint in ended:
            self.remove(hint.pin_id)
        hits = self._hits.pop(pin.pin_id, None) or PinHits()
        self._pool.pin(pin.block_hashes)
        if known is not None:
            self._remove(known)
        self.by_id[pin.pin_id], self._hits[pin.pin_id] = pin, hits
        self._by_last.setdefault(pin.block_hashes[-1], {})[pin.pin_id] = None
        if pin.is_hint:
            self._hinted.setdefault(pin.tenant, Counter()).update(pin.block_hashes)
            self._hints[pin.tenant] += 1
        return ended

    def renew(self, pin_id: PinId, expires_s: float) -> None:
        """Gives a pin that is held a new end, in Unix seconds; nothing else changes."""
        self.by_id[pin_id] = replace(self.by_id[pin_id], expires_s=expires_s)

    def remove(self, pin_id: PinId) -> Pin | None:
        """Ends a pin; returns it, or None if there is none."""
        pin = self.by_id.get(pin_id)
        if pin is not None:
            self._remove(pin)
            self._hits.pop(pin_id, None)
        return pin

    def expire(self, now_s: float) -> list[Pin]:
        """Ends the pins that have expired, and returns them."""
        return [pin for pin in self.pins if pin.has_expired(now_s) and self.remove(pin.pin_id) is not None]

    def missing(self, pin: Pin) -> int:
        """Returns how many of a pin's blocks are not readable here in a group in which it keeps them."""
        groups, hashes = self._pool.groups, pin.block_hashes
        lacking = {each for group in groups for each in group.last_of(hashes) if group.find(each) is None}
        return len(lacking)

    def admitted(self, found: Sequence[BlockHash], price_s: Callable[[int], float]) -> PinHits | None:
        """Counts an admission that found these leading blocks; returns what it adds, or None if it found no whole pin.

        It counts for all pins of the longest such prefix, whatever their owners. `price_s` predicts the seconds
        of computing this many of the first blocks.
        """
        for index in range(len(found) - 1, -1, -1) if self.by_id else ():
            pins = self._by_last.get(found[index])
            if pins is None:
                continue
            saved_s = price_s(index + 1)
            for pin_id in pins:
                self._hits[pin_id].hits += 1
                self._hits[pin_id].saved_s += saved_s
            return PinHits(1, saved_s)
        return None

    def _remove(self, pin: Pin) -> None:
        del self.by_id[pin.pin_id]
        last = self._by_last[pin.block_hashes[-1]]
        del last[pin.pin_id]
        if not last:
            del self._by_last[pin.block_hashes[-1]]
        if pin.is_hint:
            hinted = self._hinted[pin.tenant]
            _subtract(hinted, pin.block_hashes)
            _subtract(self._hints, [pin.tenant])
            if not hinted:
                del self._hinted[pin.tenant]
        self._pool.unpin(pin.block_hashes)

    def _check(self, pin: Pin, known: Pin | None, now_s: float) -> list[Pin]:
        """Returns the hints that make room for the pin. Raises PinRefused."""
        limits, blocks = self.limits, len(pin.block_hashes)
        if pin.has_expired(now_s):
            raise PinRefused("the pin's time is over already", field="expires_s")
        if pin.max_bytes and blocks * limits.page_bytes > pin.max_bytes:
            raise PinRefused(
                f"the pin takes {limits.size(blocks)}, its own cap is {pin.max_bytes:,} bytes", field="max_bytes"
            )
        if known is not None:
            return []  # its blocks are pinned already
        ended = self._room_for(pin)
        most = MOST_HINTS if pin.is_hint else MOST_PINS
        if len(self.by_id) - len(ended) >= most:
            raise PinRefused(f"there are {len(self.by_id)} pins and hints, and at most {most} are kept", field="pins")
        if pin.is_hint:
            self._check_tenant(pin)
        return ended

    def _room_for(self, pin: Pin) -> list[Pin]:
        """Returns the hints that must end for the pin to fit; a hint ends none. Raises PinRefused."""
        limits, held = self.limits, self._pool.pinned_blocks
        new = sum(not self._pool.is_pinned(block_hash) for block_hash in set(pin.block_hashes))
        has_room = self._pool.has_room_to_pin(pin.block_hashes)
        if has_room and held + new <= limits.most:
            return []
        ended = None if pin.is_hint else self._hints_to_end(pin)
        if ended is None and not has_room:
            raise PinRefused(
                "pins keep as many last blocks as they may: those of the longest request must fit",
                field="pin_cap",
            )
        if ended is None:
            raise PinRefused(
                f"the pin takes {limits.size(new)} more; pins keep {held} of {limits.total} pages and may keep "
                f"{limits.most}: {self._why_most()}",
                field="pin_cap",
            )
        return ended

    def _hints_to_end(self, pin: Pin) -> list[Pin] | None:
        """Returns the hints to end for the pin to fit, soonest ends first; None if it cannot. O(blocks of all pins)."""
        ended, uses = list[Pin](), [(group, group.pins_of_blocks()) for group in self._pool.groups]
        for group, pins in uses:
            pins.update(group.last_of(pin.block_hashes))
        for hint in sorted((each for each in self.pins if each.is_hint), key=_end_s):
            for group, pins in uses:
                _subtract(pins, group.last_of(hint.block_hashes))
            ended.append(hint)
            if all(len(pins) <= min(self.limits.most, group.most_pinned) for group, pins in uses):
                return ended
        return None

    def _check_tenant(self, pin: Pin) -> None:
        """Refuses a hint whose tenant would keep too much. Raises PinRefused."""
        if self._hints[pin.tenant] >= MOST_TENANT_HINTS:
            raise PinRefused(
                f"this tenant has {self._hints[pin.tenant]} hints, and at most {MOST_TENANT_HINTS} are kept",
                field="pins",
            )
        hinted = self._hinted.get(pin.tenant, Counter())
        new = len({block_hash for block_hash in pin.block_hashes if block_hash not in hinted})
        if len(hinted) + new > self.limits.tenant:
            raise PinRefused(
                f"the hint takes {self.limits.size(new)} more; this tenant's keep {len(hinted)} pages and may keep "
                f"{self.limits.tenant}",
                field="pin_tenant_cap",
            )

    def _why_most(self) -> str:
        limits = self.limits
        if limits.share <= limits.total - limits.longest_request:
            return f"--pin-cap allows {limits.share}"
        return (
            f"the longest request takes {limits.longest_request} and must always fit; "
            "use a larger --kv-cache-memory, or a smaller --max-model-len"
        )


def _end_s(pin: Pin) -> float:
    return math.inf if pin.expires_s is None else pin.expires_s


def _subtract(counts: Counter[Key], keys: Iterable[Key]) -> None:
    for key in keys:
        counts[key] -= 1
        if not counts[key]:
            del counts[key]
