"""The tiers of pages, nearest first."""

from __future__ import annotations

import enum

from twostroke.kv_cache.parts import GroupKind


class Tier(enum.IntEnum):
    """A tier of pages; its number is also part of the rotation of a block hash in the digest of a worker's set."""

    DEVICE = 0
    """The memory that the model computes in."""
    HOST = 1
    DISK = 2


TIERS = len(Tier)

PLACES = tuple((tier, group) for group in GroupKind for tier in Tier)
"""All places where pages of a block can be stored, in the order in which snapshots and routers list them."""
