"""The tiers of pages, nearest first, and the groups of layers whose parts of a block are kept for equally long."""

from __future__ import annotations

import enum


class Tier(enum.IntEnum):
    """A tier of pages; its number is also part of the rotation of a block hash in the digest of a worker's set."""

    DEVICE = 0
    """The memory that the model computes in."""
    HOST = 1
    DISK = 2


class Group(enum.IntEnum):
    """A page group of a model (`twostroke.kv_cache.window_parts`); most models have the first one alone."""

    FULL = 0
    """Layers that attend to all tokens, or all layers where no others have a window."""
    WINDOW = 1


TIERS = len(Tier)

PLACES = tuple((tier, group) for group in Group for tier in Tier)
"""Everything that can be stored of a block: what routers count, and what a snapshot has, in this order."""
