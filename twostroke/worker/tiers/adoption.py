"""Adoption: the pages of a worker that died and did not come back are taken in by another worker that can use them."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Collection
from typing import Final, TypeAlias

from twostroke.kv_cache.tier import Tier
from twostroke.kv_cache.tiers.folders import (
    LeftFolder,
    ScannedSegment,
    SegmentFolder,
    claim_left,
    remove_beyond,
    remove_unused,
)
from twostroke.kv_cache.tiers.trust import FolderTrust
from twostroke.transfer.copy_threads import off_loop
from twostroke.worker.tiers.disk_tier import DiskTier
from twostroke.worker.tiers.page_tiers import PageTiers

FoundPages: TypeAlias = tuple[SegmentFolder, list[ScannedSegment]]

log = logging.getLogger(__name__)

LOOK_S: Final = 30.0
"""Seconds between two searches for folders of dead workers. The owner of a folder marks it as often."""
UNSEEN_S: Final = 3 * LOOK_S
"""Seconds for which a dead worker's folder is left to a worker of the same name."""
RETURN_S: Final = 600.0
"""Seconds in which workers of other models and forms, stopped together with this one, may come back. A dead worker's
pages are left as long to a worker that has room for all of them."""
UNUSED_S: Final = 7 * 24 * 3600.0
"""Seconds after which unused pages of another model, form or version are removed."""


async def adopt_left(
    tiers: PageTiers,
    changed: Callable[[], None],
    *,
    look_s: float = LOOK_S,
    unseen_s: float = UNSEEN_S,
    return_s: float = RETURN_S,
    kept: Collection[str] = (),
) -> None:
    """Searches for folders of dead workers until cancelled, and takes in their pages. It calls `changed` then.

    After `return_s`, folders of other models are removed to make room for this worker's pages. A folder without room
    here is taken when nobody else has taken it for `return_s`; what does not fit is removed. `kept` names folders of
    the same model that hold the pages of other groups: they are never removed here.
    """
    began_s = time.monotonic()
    folder_trust = FolderTrust()
    while (disk := tiers.disk) is not None:
        await asyncio.sleep(look_s)
        removes_others = time.monotonic() - began_s >= return_s
        search = _Search(disk, folder_trust, unseen_s, return_s, kept, removes_others=removes_others)
        try:
            left = await off_loop(search.run)
        except OSError as error:
            search.give_up()
            tiers.failed(Tier.DISK, error)
            return
        except BaseException:
            search.give_up()
            raise
        for folder, found in left:
            blocks = tiers.adopted(found, folder)
            log.info("pages of a dead worker adopted folder=%s blocks=%d", folder.path, blocks)
            changed()


class _Search:
    """One search for folders of dead workers, on a thread. Its caller may have stopped waiting when it ends."""

    def __init__(
        self,
        disk: DiskTier,
        folder_trust: FolderTrust,
        unseen_s: float,
        return_s: float,
        kept: Collection[str],
        *,
        removes_others: bool,
    ) -> None:
        self._disk = disk
        self._trust = folder_trust
        self._unseen_s = unseen_s
        self._return_s = return_s
        self._kept = frozenset({disk.folder.parent.name, *kept})
        self._removes_others = removes_others
        self._room_bytes = max(0, disk.store.most_bytes - disk.store.used_bytes)
        """Bytes that other folders may take beside what this worker holds."""
        self._lock = threading.Lock()
        self._is_given_up = False
        self._left: list[FoundPages] = []

    def run(self) -> list[FoundPages]:
        """Locks and reads what was left. Raises OSError if our own folders cannot be touched."""
        self._disk.touch()
        root = self._disk.folder.parent
        removed = remove_unused(root.parent, kept=self._kept, unseen_s=UNUSED_S, folder_trust=self._trust)
        if self._removes_others:
            removed += remove_beyond(
                root.parent,
                kept=self._kept,
                unseen_s=self._unseen_s,
                most_bytes=self._room_bytes,
                folder_trust=self._trust,
            )
        if removed:
            log.info("pages of other models removed folders=%d", removed)
        wanted = self._claim_room
        for folder in claim_left(root, unseen_s=self._unseen_s, wanted=wanted, folder_trust=self._trust):
            self._read(folder)
        return self._left

    def give_up(self) -> None:
        """Unlocks what was found, and what a thread that still searches will find."""
        with self._lock:
            self._is_given_up = True
            left, self._left = self._left, []
        for folder, _ in left:
            folder.close()

    def _claim_room(self, left: LeftFolder) -> bool:
        """Returns whether to take a folder, and counts its pages as taken if there is room for them.

        Without room it is taken if nobody else has taken it for long.
        """
        if left.size_bytes > self._room_bytes:
            return left.seen_s <= time.time() - self._return_s
        self._room_bytes -= left.size_bytes
        return True

    def _read(self, folder: SegmentFolder) -> None:
        try:
            found = folder.scan(self._disk.files, self._disk.form)
            is_empty = not folder.has_segments()
        except OSError as error:
            log.warning("pages of a dead worker cannot be read folder=%s error=%s", folder.path, error)
            folder.close()
            return
        except BaseException:
            folder.close()
            raise
        if is_empty:
            folder.try_remove()
            return
        with self._lock:
            if found and not self._is_given_up:
                self._left.append((folder, found))
                return
        folder.close()
