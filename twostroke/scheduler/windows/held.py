"""The window parts that a running sequence holds."""

from __future__ import annotations

from dataclasses import dataclass

from twostroke.base.ids import PageId
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
    """Number of leading blocks that a pull or a load is to bring. Computing starts after them. 0: nothing is to be
    brought."""
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
