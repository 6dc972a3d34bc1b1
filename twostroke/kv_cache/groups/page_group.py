"""Page groups: sets of layers whose pages a sequence needs for equally many tokens. Plain numbers, no torch.

Layers that attend to all tokens need every page of a sequence. Layers with a window need those of the last tokens only.
So a block has a page in each group, and that of a window group can be removed before the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

FULL: Final = "full"
WINDOW: Final = "window"


@dataclass(frozen=True, slots=True)
class PageGroup:
    """The layers that store the keys and values of a block in one page."""

    name: str
    layers: tuple[int, ...]
    """Which of the model's layers these are, in order."""
    window: int | None = None
    """Tokens that a token sees, itself included, in the layer with the largest window. None: it sees all."""

    def first_block(self, position: int, block_size: int) -> int:
        """Returns the first block that the token at a position sees."""
        return 0 if self.window is None else max(0, position - self.window + 1) // block_size


def groups_apart(groups: tuple[PageGroup, ...], *, by_whole_blocks: bool) -> tuple[PageGroup, ...]:
    """Returns the groups with pages of their own: one group of all layers if blocks are stored as a whole."""
    if not by_whole_blocks or len(groups) == 1:
        return groups
    return page_groups([None] * sum(len(group.layers) for group in groups))


def page_groups(windows: Sequence[int | None]) -> tuple[PageGroup, ...]:
    """Returns the groups of a model by the windows of its layers, the full one first.

    There is one group of all layers if no layer has a window, and also if all have one: then windows only mask tokens.
    """
    full = tuple(layer for layer, window in enumerate(windows) if window is None)
    seen = [window for window in windows if window is not None]
    if not full or not seen:
        return (PageGroup(FULL, tuple(range(len(windows)))),)
    rest = tuple(layer for layer, window in enumerate(windows) if window is not None)
    return (PageGroup(FULL, full), PageGroup(WINDOW, rest, max(seen)))
