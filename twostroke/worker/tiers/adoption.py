"""Adoption: the pages of a worker that died and did not come back are taken in by another one that can use them."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable
from typing import Final

from twostroke.kv_cache.tiers.folders import ScannedSegment, SegmentFolder, claim_left, remove_unused
from twostroke.transfer.copy_threads import off_loop
from twostroke.worker.tiers.disk_tier import DiskTier
from twostroke.worker.tiers.page_tiers import PageTiers

log = logging.getLogger(__name__)

LOOK_S: Final = 30.0
"""Time between two looks for folders that were left; the owner of a folder is seen as often."""
UNSEEN_S: Final = 3 * LOOK_S
"""A dead worker's folder waits so long for a worker of its name."""
UNUSED_S: Final = 7 * 24 * 3600.0
"""Pages of another model, form or version are removed when nobody has used them for so long."""


async def adopt_left(
    tiers: PageTiers, changed: Callable[[], None], *, look_s: float = LOOK_S, unseen_s: float = UNSEEN_S
) -> None:
    """Look for folders that were left until cancelled; `changed` is called when pages were taken in."""
    while (disk := tiers.disk) is not None:
        await asyncio.sleep(look_s)
        try:
            left = await off_loop(functools.partial(_left, disk, unseen_s))
        except OSError as error:
            tiers.failed(error)
            return
        for folder, found in left:
            blocks = tiers.adopted(found, folder)
            log.info("pages of a dead worker adopted folder=%s blocks=%d", folder.path, blocks)
            changed()


def _left(disk: DiskTier, unseen_s: float) -> list[tuple[SegmentFolder, list[ScannedSegment]]]:
    """Lock and read what was left. Raises OSError."""
    disk.touch()
    root = disk.folder.parent
    removed = remove_unused(root.parent, kept=root.name, unseen_s=UNUSED_S)
    if removed:
        log.info("pages of other models removed folders=%d", removed)
    left: list[tuple[SegmentFolder, list[ScannedSegment]]] = []
    for folder in claim_left(root, unseen_s=unseen_s):
        found = folder.scan(disk.files, disk.form)
        if found:
            left.append((folder, found))
        else:
            folder.remove()
    return left
