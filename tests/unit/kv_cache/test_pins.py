"""The pin table: random histories against an oracle, and what it says when it refuses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from twostroke.base.errors import PinRefused
from twostroke.base.ids import BlockHash, PageId, PinId
from twostroke.kv_cache.block import block_hashes_of, root_hash
from twostroke.kv_cache.pins import pin_table
from twostroke.kv_cache.pins.pin_table import Pin, PinLimits, PinTable, pin_id_of
from twostroke.kv_cache.pool import BlockPool
from twostroke.kv_cache.windows.shape import WindowShape
from twostroke.kv_cache.windows.window_group import window_group

PAGE_BYTES = 100
LIMITS = PinLimits.of(20, PAGE_BYTES, 12, share=0.3, tenant_share=0.2)


class Silent:
    def stored(self, block_hashes: Sequence[BlockHash]) -> None: ...

    def evicting(self, page: PageId, block_hash: BlockHash, parent: BlockHash) -> None: ...

    def forgotten(self, block_hash: BlockHash) -> None: ...

    def removed(self, block_hashes: Sequence[BlockHash]) -> None: ...

    def new_writers(self, pages: Sequence[PageId]) -> None: ...


def pin_of(*tokens: int, owner: str = "ops", tenant: str = "", **changes) -> Pin:
    """One block per token."""
    hashes = tuple(block_hashes_of(tokens, 1))
    pin_id = pin_id_of(owner, tenant, hashes[-1])
    return Pin(pin_id=pin_id, owner=owner, tenant=tenant, tokens=tokens, block_hashes=hashes, **changes)


def union(held: list[Pin]) -> set[BlockHash]:
    return {block_hash for pin in held for block_hash in pin.block_hashes}


class PinHistory(RuleBasedStateMachine):
    """The oracle is a list of pins, of which everything is computed anew."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(LIMITS.total, Silent())
        self.table = PinTable(self.pool, LIMITS)
        self.truth: dict[PinId, Pin] = {}
        self.hits: dict[PinId, int] = {}
        self.now_s = 0.0

    def displaced(self, pin: Pin) -> list[PinId]:
        """Hints that must end for the pin, those first that end soonest."""
        held, gone = dict(self.truth), list[PinId]()
        if pin.is_hint or pin.pin_id in held:
            return gone
        while len(union([*held.values(), pin])) > 6:
            hints = [each for each in held.values() if each.is_hint]
            if not hints:
                return []
            first = min(hints, key=lambda each: float("inf") if each.expires_s is None else each.expires_s)
            gone.append(first.pin_id)
            del held[first.pin_id]
        return gone

    def refusal(self, pin: Pin) -> str | None:
        displaced = self.displaced(pin)
        held = [each for each in self.truth.values() if each.pin_id not in displaced]
        if pin.expires_s is not None and pin.expires_s <= self.now_s:
            return "expires_s"
        if pin.max_bytes and len(pin.block_hashes) * PAGE_BYTES > pin.max_bytes:
            return "max_bytes"
        if pin.pin_id in self.truth:
            return None
        if len(union([*held, pin])) > 6:
            return "pin_cap"
        hints = [each for each in held if each.is_hint and each.tenant == pin.tenant]
        return "pin_tenant_cap" if pin.is_hint and len(union([*hints, pin])) > 4 else None

    @rule(
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=5),
        owner=st.sampled_from(["ops", "team", ""]),
        tenant=st.sampled_from(["", "shop"]),
        lasts_s=st.none() | st.integers(0, 5),
        max_bytes=st.sampled_from([0, 0, 300]),
    )
    def put(self, tokens: list[int], owner: str, tenant: str, lasts_s: int | None, max_bytes: int) -> None:
        expires_s = None if lasts_s is None else self.now_s + lasts_s
        is_hint = not owner
        pin = pin_of(*tokens, owner=owner, tenant=tenant, expires_s=expires_s, max_bytes=max_bytes, is_hint=is_hint)
        expected, displaced = self.refusal(pin), self.displaced(pin)
        if expected is None:
            assert [hint.pin_id for hint in self.table.put(pin, self.now_s)] == displaced
            for pin_id in displaced:
                del self.truth[pin_id], self.hits[pin_id]
            self.truth.pop(pin.pin_id, None)  # replaced, it is the youngest
            self.truth[pin.pin_id] = pin
            self.hits.setdefault(pin.pin_id, 0)
        else:
            with pytest.raises(PinRefused) as refused:
                self.table.put(pin, self.now_s)
            assert refused.value.field == expected

    @rule(pick=st.integers(0, 10**6), lasts_s=st.integers(1, 5))
    def renew(self, pick: int, lasts_s: int) -> None:
        if self.truth:
            pin_id = sorted(self.truth)[pick % len(self.truth)]
            self.table.renew(pin_id, self.now_s + lasts_s)
            self.truth[pin_id] = replace(self.truth[pin_id], expires_s=self.now_s + lasts_s)

    @rule(pick=st.integers(0, 10**6))
    def remove(self, pick: int) -> None:
        ids = [*sorted(self.truth), PinId("unknown")]
        pin_id = ids[pick % len(ids)]
        assert self.table.remove(pin_id) == self.truth.pop(pin_id, None)
        self.hits.pop(pin_id, None)

    @rule(seconds=st.integers(1, 4))
    def expire(self, seconds: int) -> None:
        self.now_s += seconds
        gone = {pin.pin_id for pin in self.truth.values() if pin.expires_s is not None and pin.expires_s <= self.now_s}
        assert {pin.pin_id for pin in self.table.expire(self.now_s)} == gone
        for pin_id in gone:
            del self.truth[pin_id], self.hits[pin_id]

    @rule(tokens=st.lists(st.integers(0, 1), max_size=6))
    def admit(self, tokens: list[int]) -> None:
        found = block_hashes_of(tokens, 1)
        whole = [pin for pin in self.truth.values() if list(pin.block_hashes) == found[: len(pin.block_hashes)]]
        longest = max((len(pin.block_hashes) for pin in whole), default=0)
        counted = self.table.admitted(found, float)
        assert (0.0 if counted is None else counted.saved_s) == longest
        for pin in whole:
            if len(pin.block_hashes) == longest:
                self.hits[pin.pin_id] += 1

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=5))
    def compute(self, tokens: list[int]) -> None:
        claim = self.pool.claim(block_hashes_of(tokens, 1), root_hash(), 0)
        assert claim is not None, "nobody else holds pages, and pins leave enough"
        for index in claim.missing:
            self.pool.fill(claim.pages[index])
        self.pool.release(claim.pages)

    @invariant()
    def table_and_oracle_agree(self) -> None:
        self.pool.check_integrity()
        assert {pin.pin_id: pin for pin in self.table.pins} == self.truth
        assert self.table.pinned_blocks == len(union(list(self.truth.values())))
        assert self.pool.available >= LIMITS.longest_request
        ends = [pin.expires_s for pin in self.truth.values() if pin.expires_s is not None]
        assert self.table.next_end_s == min(ends, default=None)
        for pin_id, hits in self.hits.items():
            assert self.table.hits(pin_id).hits == hits
        for pin in self.table.pins:
            assert self.table.missing(pin) == sum(self.pool.find(block) is None for block in pin.block_hashes)

    def teardown(self) -> None:
        for pin_id in list(self.truth):
            self.table.remove(pin_id)
        assert self.pool.pinned_blocks == 0
        assert self.table._hinted == {}
        assert self.table._hints == {}
        assert self.table._by_last == {}


TestPinHistory = PinHistory.TestCase
TestPinHistory.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_the_cap_is_the_share_or_what_the_longest_request_leaves() -> None:
    assert PinLimits.of(100, 1, 60, share=0.25, tenant_share=0.1).most == 25
    assert PinLimits.of(100, 1, 90, share=0.25, tenant_share=0.1).most == 10
    assert PinLimits.of(100, 1, 100, share=0.25, tenant_share=0.1).most == 0


def test_a_refusal_says_what_is_wanted_what_is_held_and_what_may_be() -> None:
    table = PinTable(BlockPool(20, Silent()), LIMITS)
    table.put(pin_of(1, 2, 3), 0.0)
    with pytest.raises(
        PinRefused, match=r"4 pages \(400 bytes\) more; pins keep 3 of 20 .* may keep 6: --pin-cap allows 6"
    ):
        table.put(pin_of(4, 5, 6, 7), 0.0)
    scarce = PinTable(BlockPool(20, Silent()), PinLimits.of(20, PAGE_BYTES, 18, share=0.3, tenant_share=0.2))
    with pytest.raises(PinRefused, match=r"may keep 2: the longest request takes 18 .* smaller --max-model-len"):
        scarce.put(pin_of(1, 2, 3), 0.0)


def test_pins_are_bounded_in_number(monkeypatch) -> None:
    monkeypatch.setattr(pin_table, "MOST_PINS", 2)
    table = PinTable(BlockPool(20, Silent()), LIMITS)
    table.put(pin_of(1), 0.0)
    table.put(pin_of(2), 0.0)
    table.put(pin_of(2), 0.0)
    with pytest.raises(PinRefused, match="there are 2 pins and hints, and at most 2 are kept"):
        table.put(pin_of(3), 0.0)
    monkeypatch.setattr(pin_table, "MOST_HINTS", 1)
    monkeypatch.setattr(pin_table, "MOST_PINS", 3)
    with pytest.raises(PinRefused, match="at most 1 are kept"):
        table.put(pin_of(3, owner="", is_hint=True), 0.0)
    table.put(pin_of(3), 0.0)


def test_one_tenant_cannot_take_the_places_of_all_hints(monkeypatch) -> None:
    monkeypatch.setattr(pin_table, "MOST_TENANT_HINTS", 2)
    table = PinTable(BlockPool(20, Silent()), LIMITS)
    first, second, third = (pin_of(number, owner="", tenant="a", is_hint=True) for number in (1, 2, 3))
    table.put(first, 0.0)
    table.put(second, 0.0)
    table.put(second, 0.0)
    with pytest.raises(PinRefused, match="this tenant has 2 hints, and at most 2 are kept") as refused:
        table.put(third, 0.0)
    assert refused.value.field == "pins"
    table.put(pin_of(3, owner="", tenant="b", is_hint=True), 0.0)
    table.put(pin_of(4, tenant="a"), 0.0)
    table.remove(first.pin_id)
    table.put(third, 0.0)


def test_the_hints_of_one_tenant_keep_no_more_blocks_together_than_its_share() -> None:
    table = PinTable(BlockPool(20, Silent()), replace(LIMITS, tenant=3))
    table.put(pin_of(1, 2, owner="", tenant="a", is_hint=True), 0.0)
    with pytest.raises(PinRefused, match="keep 2 pages and may keep 3"):
        table.put(pin_of(3, 4, owner="", tenant="a", is_hint=True), 0.0)
    table.put(pin_of(3, 4, owner="", tenant="b", is_hint=True), 0.0)
    table.put(pin_of(5, owner="", tenant="a", is_hint=True), 0.0)


def test_hints_make_room_for_a_pin_and_for_no_other_hint() -> None:
    table = PinTable(BlockPool(20, Silent()), LIMITS)
    soon = pin_of(1, 2, owner="", tenant="a", is_hint=True, expires_s=5.0)
    later = pin_of(3, 4, owner="", tenant="b", is_hint=True, expires_s=9.0)
    table.put(later, 0.0)
    table.put(soon, 0.0)
    with pytest.raises(PinRefused):
        table.put(pin_of(5, 6, 7, owner="", tenant="c", is_hint=True, expires_s=9.0), 0.0)
    assert table.put(pin_of(5, 6, 7), 0.0) == [soon]
    assert table.put(pin_of(5, 6, 7, 8, 9, 10), 0.0) == [later]
    with pytest.raises(PinRefused, match="pins keep 6 of 20"):
        table.put(pin_of(11), 0.0)


def test_owner_and_tenant_cannot_be_chosen_to_make_the_id_of_anothers_pin() -> None:
    block = block_hashes_of([1], 1)[0]
    ids = {pin_id_of(owner, tenant, block) for owner, tenant in (("ab", ""), ("a", "b"), ("", "ab"), ("b", "a"))}
    assert len(ids) == 4


def test_hints_make_room_for_the_window_parts_of_a_pin_too() -> None:
    shape = WindowShape(PageId(20), 9, 2, 1)  # 6 for a sequence, 1 for a chunk: 2 for pins, those of one prefix
    table = PinTable(BlockPool(20, Silent(), window_group(shape, Silent())), LIMITS)
    hint = pin_of(1, 2, owner="", tenant="a", is_hint=True, expires_s=5.0)
    table.put(hint, 0.0)
    with pytest.raises(PinRefused, match="last blocks"):
        table.put(pin_of(3, 4, owner="", tenant="b", is_hint=True, expires_s=9.0), 0.0)
    assert table.put(pin_of(3, 4), 0.0) == [hint]
    with pytest.raises(PinRefused, match="last blocks"):
        table.put(pin_of(5, 6), 0.0)


def test_as_many_hints_end_as_the_window_parts_of_a_pin_need() -> None:
    shape = WindowShape(PageId(20), 13, 2, 1)  # 6 for a sequence, 3 for a chunk: 4 for pins
    table = PinTable(BlockPool(20, Silent(), window_group(shape, Silent())), LIMITS)
    hints = [pin_of(number, owner="", tenant="a", is_hint=True, expires_s=number) for number in (1, 2, 3, 4)]
    for hint in hints:
        table.put(hint, 0.0)
    assert table.put(pin_of(5, 6), 0.0) == hints[:2]
