"""Where a page may lie, nearest first."""

from __future__ import annotations

import enum


class Tier(enum.IntEnum):
    """The number is the place in order, and how far a name is turned in the digest of a worker's set."""

    DEVICE = 0
    """Where the model computes."""
    HOST = 1
    DISK = 2
