"""A block has a page in each page group. A *part* is a block in one group: what one page holds.

Page ids are unique across groups, so that transfers and digests need to know nothing of groups.
"""

from __future__ import annotations

import enum
import functools
import itertools
from collections.abc import Callable, Iterable
from typing import NamedTuple


class GroupKind(enum.IntEnum):
    """The number of a page group (`twostroke.kv_cache.groups`). Most models have only the first one."""

    FULL = 0
    """Layers that attend to all tokens. In a model without a further group: all layers."""
    FURTHER = 1
    """Layers that need the pages of some blocks only."""


class Part(NamedTuple):
    """One part of a block of a prompt. Parts are ordered by block, then by group."""

    block: int
    """Index of the block in its prompt."""
    group: GroupKind


_part: Callable[[tuple[int, GroupKind]], Part] = functools.partial(tuple.__new__, Part)
"""Makes a part from its fields, six times as fast as the class, whose `__new__` is written in Python."""


def parts_of(blocks: Iterable[int], group: GroupKind = GroupKind.FULL) -> list[Part]:
    """Returns the parts of these blocks in one group, in order."""
    return parts_from(sorted(blocks), itertools.repeat(group))


def parts_from(blocks: Iterable[int], groups: Iterable[GroupKind]) -> list[Part]:
    """Returns the part of each block in the group at the same index of `groups`."""
    return list(map(_part, zip(blocks, groups, strict=False)))


def blocks_of(parts: Iterable[Part], group: GroupKind) -> list[int]:
    """Returns the blocks of the parts that belong to this group."""
    return [block for block, each in parts if each is group]
