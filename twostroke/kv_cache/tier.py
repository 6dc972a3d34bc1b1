"""The tiers of pages, nearest first."""

from __future__ import annotations

import enum


class Tier(enum.IntEnum):
    """A tier of pages; its number is also the rotation of a block hash in the digest of a worker's set."""

    DEVICE = 0
    """The memory that the model computes in."""
    HOST = 1
    DISK = 2
