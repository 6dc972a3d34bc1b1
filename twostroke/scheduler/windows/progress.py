"""Decides which blocks sequences compute, write and pass over, for models with window parts.

A sequence holds the pages of all of its blocks, and the window parts of those that its next tokens see. As it advances
it releases the parts that it has passed. It continues after the deepest block before which all pages and the last
window parts are here. From there it needs one of the following:

- the window parts of every block that it computes, also of those whose pages are filled: of these it computes the
  window parts alone, and what it computes for their pages is not kept; or
- all pages up to where a pull or a load ends, and the last window parts there: nothing in between.

A sequence that begins commits the most parts that it will hold: the parts before the block that it computes, those of
one chunk, and those at the end of a pull. Once its prompt is computed, it takes slots one by one, as it does pages.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as ListOf
from dataclasses import dataclass

from twostroke.base.ids import BlockHash, PageId, SessionId
from twostroke.kv_cache.parts import GroupKind, Part, parts_of
from twostroke.kv_cache.pool import BlockPool, Claim
from twostroke.kv_cache.windows.window_group import WindowGroup, window_group_of
from twostroke.scheduler.progress import BlockProgress, PageProgress
from twostroke.scheduler.sequence import Sequence


@dataclass(slots=True)
class HeldWindows:
    """The window parts of one sequence. Its progress alone changes them."""

    slots: dict[int, PageId]
    """Slot of each block with a window part that it holds."""
    most: int | None
    """Slots that were promised to it when it began. None: nothing was promised, and it takes slots one by one."""
    promised: int
    """Leading blocks to which the promise applies. Slots for later blocks are taken in addition."""
    pulled_depth: int = 0
    """Number of leading blocks that a pull or a load is to bring, 0 for none. Computing starts after them."""
    full_blocks: int = 0
    """Number of leading blocks with filled pages."""
    filled_parts: int = 0
    """End of the blocks with window parts that are filled already when the next chunk runs."""

    @property
    def committed(self) -> int:
        """Slots that may not be promised to other sequences."""
        return len(self.slots) if self.most is None else self.most


def held_by(sequence: Sequence) -> HeldWindows | None:
    """Returns the window parts that the sequence holds. None while it waits, and where there is one page group."""
    held = sequence.further
    assert held is None or isinstance(held, HeldWindows), "windows are the one kind of further group"
    return held


def held_of(sequence: Sequence) -> HeldWindows:
    """Returns the window parts of a running sequence."""
    held = held_by(sequence)
    assert held is not None, "it holds its window parts while it runs"
    return held


class WindowProgress:
    pages_tell_all = False
    """Window parts come and go with the blocks of other sequences."""

    def __init__(
        self,
        pool: BlockPool,
        windows: WindowGroup,
        block_size: int,
        step_tokens: int,
        loaded_depth: Callable[[ListOf[BlockHash]], int],
    ) -> None:
        """`loaded_depth` returns after how many blocks a sequence continues once local suppliers have loaded theirs."""
        self._pool = pool
        self._windows = windows
        self._loaded_depth = loaded_depth
        self._block_size = block_size
        self._whole = PageProgress(pool, block_size)
        self._chunk_blocks = min(-(-step_tokens // block_size) + 1, windows.shape.chunk_slots)
        """Most blocks of one chunk: those of a step, or fewer, so that other sequences can begin, too."""

    def is_blocked(self, sequence: Sequence) -> bool:
        return False

    def may_begin(self, sequence: Sequence) -> bool:
        depth = self._pool.hits(sequence.block_hashes)
        sequence.loaded_blocks = self._loaded_depth(sequence.block_hashes)
        return self._windows.has_room(self._most_parts(sequence, depth))

    def begin(self, sequence: Sequence, claim: Claim) -> list[Part]:
        self._whole.begin(sequence, claim)
        hashes, depth = sequence.block_hashes, claim.hits
        most = self._most_parts(sequence, depth)
        held = {block: self._windows.hold(hashes[block]) for block in self._windows.shape.tail(depth)}
        promised = self._promised_blocks(sequence)
        sequence.further = HeldWindows(held, most, promised, pulled_depth=self._pulled_depth(sequence, depth))
        self._windows.commit(most)
        for block in range(promised, len(sequence.pages)):
            slot = self._windows.take_private()
            assert slot is not None, "it began only because there was room"
            held[block] = slot
        self._leave_promise(sequence)
        if not sequence.preemptions:
            self._count_blocks_to_compute(sequence, claim)
        return sorted([*parts_of(claim.missing), *parts_of(self._take_tail(sequence), GroupKind.FURTHER)])

    def catch_up(self, sequence: Sequence) -> bool:
        held, size, count = held_of(sequence), self._block_size, len(sequence.block_hashes)
        pages, full = sequence.pages, max(held.full_blocks, sequence.computed // size)
        while full < count and self._pool.is_filled(pages[full]):
            full += 1
        is_changed, held.full_blocks = full != held.full_blocks, full
        block = reached = sequence.computed // size
        if block < held.pulled_depth <= full and self._has_tail(held):
            reached = held.pulled_depth
        while reached < full and self._hold_filled(sequence, reached):
            reached += 1
        if reached > block:
            sequence.computed = reached * size
            self._passed(sequence, reached)
        return is_changed or reached > block

    def runnable_end(self, sequence: Sequence, end: int) -> int:
        held, size, count = held_of(sequence), self._block_size, len(sequence.block_hashes)
        first, room = sequence.computed // size, None if held.most is None else held.most - len(held.slots)
        if first < count and self._is_coming(sequence):
            return first * size
        for block in range(first, -(-end // size)):
            if block < count and self._is_others_work(sequence, block, first):
                return block * size
            if room is not None and block not in held.slots:
                if not room:
                    return block * size
                room -= 1
        return end

    def take(self, sequence: Sequence, start: int, end: int) -> int:
        held, size = held_of(sequence), self._block_size
        for block in range(start // size, -(-end // size)):
            if block not in held.slots:
                slot = self._take_slot(sequence, block)
                if slot is None:
                    return min(end, block * size)
                held.slots[block] = slot
        return end

    def begin_writing(self, sequence: Sequence, start: int, end: int) -> None:
        self._whole.begin_writing(sequence, start, end)
        held, size = held_of(sequence), self._block_size
        for block in range(start // size, -(-end // size)):
            slot = held.slots[block]
            if self._windows.is_filled(slot):
                held.filled_parts = block + 1
            elif self._windows.is_unwritten(slot):
                self._windows.assign_writer(slot, sequence.session)

    def make_readable(self, sequence: Sequence, end: int) -> None:
        self._whole.make_readable(sequence, end)
        held, size = held_of(sequence), self._block_size
        for block in range(sequence.computed // size, end // size):
            slot, block_hash = held.slots[block], sequence.block_hashes[block]
            if self._windows.is_arriving(slot):
                self._windows.fill(slot)
            elif not self._windows.is_filled(slot) and self._pool.find(block_hash) == sequence.pages[block]:
                self._windows.register_private(slot, block_hash)
        if not sequence.preemptions:
            last = min(end // size, held.pulled_depth)
            sequence.computed_blocks.update(range(sequence.computed // size, last))
        self._passed(sequence, end // size)

    def grow(self, sequence: Sequence) -> bool:
        held = held_of(sequence)
        if not self._windows.has_room(1) or not self._whole.grow(sequence):
            return False
        slot = self._windows.take_private()
        if slot is None:
            self._pool.release([sequence.pages.pop()])
            return False
        self._windows.commit(1)
        if held.most is not None:
            held.most += 1
        held.slots[len(sequence.pages) - 1] = slot
        return True

    def recomputed_tokens(self, sequence: Sequence) -> int:
        held = held_of(sequence)
        if self._is_coming(sequence):
            return 0
        return max(0, held.full_blocks * self._block_size - sequence.computed)

    def pull_to(self, sequence: Sequence, depth: int) -> list[Part]:
        pages = self._whole.pull_to(sequence, depth)
        return sorted([*pages, *parts_of(self._windows_to(sequence, depth), GroupKind.FURTHER)])

    def release(self, sequence: Sequence) -> None:
        held, sequence.further = held_by(sequence), None
        if held is not None:
            self._let_go(sequence, [held.slots[block] for block in sorted(held.slots)])
            self._windows.commit(-held.committed)
        self._whole.release(sequence)

    # Internals

    def _windows_to(self, sequence: Sequence, depth: int) -> list[int]:
        """Prepares for a pull that ends after `depth` blocks; returns the blocks whose window parts it is to bring."""
        held, shape, size = held_by(sequence), self._windows.shape, self._block_size
        tail = shape.tail(min(depth, len(sequence.block_hashes)))
        if held is None or held.most is None or tail.stop * size <= sequence.computed:
            return []
        if not self._windows.has_room(len(tail)):
            return []
        self._windows.commit(len(tail))
        held.most += len(tail)
        computed = range(tail.stop, min(held.pulled_depth, sequence.prompt_tokens // size))
        sequence.computed_blocks.update(computed)  # nothing else brings these
        held.pulled_depth = tail.stop
        self._take_tail(sequence)
        return [block for block in tail if self._windows.is_unwritten(held.slots[block])]

    def _count_blocks_to_compute(self, sequence: Sequence, claim: Claim) -> None:
        """Notes which blocks of the prompt are computed for this sequence: those after its hit, pulled ones excepted.

        Others compute those that are arriving. Of those that are here it may pass over some: no sequence relies on
        that.
        """
        first, missing = max(claim.hits, held_of(sequence).pulled_depth), set(claim.missing)
        sequence.computed_blocks.update(
            block
            for block in range(first, sequence.prompt_tokens // self._block_size)
            if block in missing or self._pool.is_filled(claim.pages[block]) or sequence.computes_all
        )

    def _pulled_depth(self, sequence: Sequence, depth: int) -> int:
        """Returns where a pull, or else a load, will end. 0 if a sequence continues at `depth` without one."""
        pulled = min(sequence.pulled_blocks, len(sequence.block_hashes))
        if pulled > depth:
            return pulled
        return sequence.loaded_blocks if sequence.loaded_blocks > depth else 0

    def _promised_blocks(self, sequence: Sequence) -> int:
        """Returns the number of leading blocks whose slots are promised. Slots for later blocks are taken one by one.

        The promised blocks have hashes, except those of a scored prompt, which get theirs as they are computed.
        """
        return sequence.prompt_tokens // self._block_size if sequence.computes_all else len(sequence.block_hashes)

    def _take_slot(self, sequence: Sequence, block: int) -> PageId | None:
        if block < len(sequence.block_hashes):
            return self._windows.take(sequence.block_hashes[block])
        assert block < held_of(sequence).promised, "other private blocks have their slots from the beginning"
        return self._windows.take_private()

    def _most_parts(self, sequence: Sequence, depth: int) -> int:
        tail, blocks = self._windows.shape.tail_blocks, self._promised_blocks(sequence)
        private = 1 if sequence.sampling else 0
        tails = 2 if self._pulled_depth(sequence, depth) else 1
        return min(blocks, tails * tail + self._chunk_blocks) + private

    def _take_tail(self, sequence: Sequence) -> list[int]:
        """Holds the window parts at the end of a pull or load; returns the blocks with parts that are to be brought."""
        held, missing = held_of(sequence), list[int]()
        for block in self._windows.shape.tail(held.pulled_depth):
            if block in held.slots:
                continue
            block_hash = sequence.block_hashes[block]
            missing += [] if self._windows.is_known(block_hash) else [block]
            slot = self._windows.take(block_hash)
            assert slot is not None, "it began only because there was room"
            held.slots[block] = slot
        return missing

    def _has_tail(self, held: HeldWindows) -> bool:
        tail = self._windows.shape.tail(held.pulled_depth)
        return all(block in held.slots and self._windows.is_filled(held.slots[block]) for block in tail)

    def _hold_filled(self, sequence: Sequence, block: int) -> bool:
        """Holds the window part of a block if it is filled; returns False if it is not."""
        held = held_of(sequence)
        slot = held.slots.get(block)
        if slot is not None:
            return self._windows.is_filled(slot)
        if self._windows.find(sequence.block_hashes[block]) is None:
            return False
        held.slots[block] = self._windows.hold(sequence.block_hashes[block])
        return True

    def _is_coming(self, sequence: Sequence) -> bool:
        """Returns whether others write what a pulled sequence lacks: its next page and its last window parts."""
        held, depth = held_of(sequence), held_of(sequence).pulled_depth
        if sequence.computed >= depth * self._block_size:
            return False
        page = sequence.pages[min(held.full_blocks, depth - 1)]
        if not self._pool.is_filled(page) and not self._whole.has_other_writer(sequence, page):
            return False
        return all(
            self._windows.is_filled(slot) or self._is_others(sequence, self._windows.writer(slot))
            for slot in (held.slots.get(block) for block in self._windows.shape.tail(depth))
            if slot is not None
        )

    def _is_others_work(self, sequence: Sequence, block: int, first: int) -> bool:
        """Returns whether a chunk that begins with block `first` ends before this one.

        Of a chunk either all pages are filled already or none, and so it is with window parts: what a forward pass
        computes of filled ones is not kept.
        """
        page, block_hash = sequence.pages[block], sequence.block_hashes[block]
        if self._whole.has_other_writer(sequence, page):
            return True
        if self._is_others(sequence, self._windows.writer_of(block_hash)):
            return True
        is_filled, has_part = self._pool.is_filled(page), self._windows.find(block_hash) is not None
        if block == first:
            return is_filled and has_part
        had_part = self._windows.find(sequence.block_hashes[first]) is not None
        return (is_filled, has_part) != (self._pool.is_filled(sequence.pages[first]), had_part)

    def _is_others(self, sequence: Sequence, writer: SessionId | None) -> bool:
        return writer not in (None, sequence.session)

    def _passed(self, sequence: Sequence, depth: int) -> None:
        """Releases the window parts that no token after the first `depth` blocks sees."""
        held, shape = held_of(sequence), self._windows.shape
        tail = shape.tail(depth)
        passed = sorted(block for block in held.slots if block < tail.start)
        ends = [shape.tail(end) for end in (sequence.prompt_tokens // self._block_size, sequence.hit_blocks)]
        for block in passed:
            self._let_go(sequence, [held.slots.pop(block)], is_end=any(block in end for end in ends))
        if held.most is None:
            self._windows.commit(-len(passed))
        elif depth >= held.promised:
            self._leave_promise(sequence, depth)

    def _let_go(self, sequence: Sequence, slots: ListOf[PageId], *, is_end: bool = True) -> None:
        """Releases slots; those that the sequence had begun to write are left to others."""
        for slot in slots:
            if self._windows.writer(slot) == sequence.session:
                self._windows.clear_writer(slot)
        self._windows.release(slots, is_end=is_end)

    def _leave_promise(self, sequence: Sequence, depth: int | None = None) -> None:
        """Gives back slots that were promised and are not held, once all promised blocks are computed."""
        held = held_of(sequence)
        reached = sequence.computed // self._block_size if depth is None else depth
        if held.most is not None and reached >= held.promised:
            self._windows.commit(len(held.slots) - held.most)
            held.most = None


def progress_of(
    pool: BlockPool, block_size: int, step_tokens: int, loaded_depth: Callable[[ListOf[BlockHash]], int]
) -> BlockProgress:
    """Returns the progress of sequences through their blocks, with window parts where the pool has some."""
    windows = window_group_of(pool)
    if windows is None:
        return PageProgress(pool, block_size)
    return WindowProgress(pool, windows, block_size, step_tokens, loaded_depth)
