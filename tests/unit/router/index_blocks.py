"""What a prefix index shows of one worker."""

from __future__ import annotations

from router.routing.prefix_index import PrefixIndex
from twostroke.base.ids import BlockHash, WorkerId
from twostroke.kv_cache.parts import GroupKind
from twostroke.kv_cache.tier import Tier


def hashes_of(
    index: PrefixIndex, worker: WorkerId, tier: Tier = Tier.DEVICE, group: GroupKind = GroupKind.FULL
) -> frozenset[BlockHash]:
    """Returns none while they are not known to be right."""
    shown = index.snapshot(worker)
    changes = () if shown is None else shown.changes
    return frozenset(block for change in changes if change.place == (tier, group) for block in change.stored)
