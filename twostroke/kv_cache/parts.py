"""A block has a page in each page group. A *part* is a block in one group: what one page holds.

Pages of all groups have ids of one space, so that a transfer or a digest needs to know nothing of groups.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import NamedTuple


class GroupKind(enum.IntEnum):
    """The number of a page group (`twostroke.kv_cache.groups`). Most models have only the first one."""

    FULL = 0
    """Layers that attend to all tokens. In a model without a further group: all layers."""
    FURTHER = 1
    """Layers that need the pages of some blocks only."""


class Part(NamedTuple):
    """One part of a block of a prompt; parts in order are those of the first block first."""

    block: int
    """Index of the block in its prompt."""
    group: GroupKind


def parts_of(blocks: Iterable[int], group: GroupKind = GroupKind.FULL) -> list[Part]:
    """Returns the parts of these blocks in one group, in order."""
    return [Part(block, group) for block in sorted(blocks)]


def blocks_of(parts: Iterable[Part], group: GroupKind) -> list[int]:
    """Returns the blocks of those of the parts that are of this group."""
    return [block for block, each in parts if each is group]
