"""Opens the tiers of a worker: allocates memory, locks the folder on disk, and reads the headers there."""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future, wait
from pathlib import Path

from twostroke.base.errors import ConfigError
from twostroke.config import WorkerConfig
from twostroke.config.cache import CacheConfig
from twostroke.engine.backends.facts import LoadedModel
from twostroke.kv_cache.layout import PoolLayout
from twostroke.kv_cache.memory import PageMemory, Pages
from twostroke.kv_cache.parts import GroupKind
from twostroke.kv_cache.pool_size import enough_pages
from twostroke.kv_cache.tiers.disk_store import LEAST_RECORDS
from twostroke.kv_cache.tiers.files import SegmentFiles
from twostroke.kv_cache.tiers.folders import ScannedSegment, SegmentFolder, claim_own, make_private, model_folder
from twostroke.kv_cache.tiers.record import RecordFormat, identity_of
from twostroke.kv_cache.tiers.trust import check_root
from twostroke.models.catalog.places import cache_dir
from twostroke.transfer.copy_threads import CopyThreads
from twostroke.worker.measured.page_time import PageTime
from twostroke.worker.tiers.disk_tier import DiskTier, OpenedDisk
from twostroke.worker.tiers.group_tiers import GroupTiers
from twostroke.worker.tiers.host_tier import HostTier
from twostroke.worker.tiers.metrics import TierChanges
from twostroke.worker.tiers.page_tiers import PageTiers

log = logging.getLogger(__name__)

MISTAKES = (
    errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.ELOOP, errno.ENAMETOOLONG, errno.ENOENT,
)  # fmt: skip
"""Error numbers that mean a wrong folder, and not a failing disk."""
ANSWER_S = 10.0
"""Most seconds for locking the folder, and writing and reading a record. A disk that needs longer is left out."""


def open_tiers(config: WorkerConfig, facts: LoadedModel, pool_memory: Pages) -> GroupTiers:
    """Opens the tiers that the configuration asks for. Takes seconds where much lies on disk.

    Raises ConfigError for what cannot work. A disk in trouble is left out, with a warning.
    """
    opened: list[PageTiers] = []
    try:
        for number in range(len(facts.layout.regions)):
            opened.append(_open_group(GroupKind(number), config, facts, pool_memory))
    except BaseException:
        for tiers in opened:
            tiers.close_now()
        raise
    return GroupTiers(opened)


def _open_group(group: GroupKind, config: WorkerConfig, facts: LoadedModel, pool_memory: Pages) -> PageTiers:
    cache = share_of(group, config.cache, facts.layout)
    opened = open_disk(cache, config.worker_id, facts, group=group) if cache.disk_cache_bytes else None
    try:
        host_memory = _host_memory(cache, facts.layout.page_sizes[group]) if cache.host_cache_bytes else None
        return page_tiers_of(pool_memory, host_memory, opened, group=group, wants_disk=cache.disk_cache_bytes > 0)
    except BaseException:
        if opened is not None:
            opened.own.close()
        raise


def page_tiers_of(
    pool_memory: Pages,
    host_memory: PageMemory | None,
    opened: OpenedDisk | None,
    *,
    group: GroupKind = GroupKind.FULL,
    wants_disk: bool,
) -> PageTiers:
    """Starts the threads of the opened tiers. `opened` is None although `wants_disk` where the disk is in trouble."""
    changes = TierChanges(group)
    disk = None if opened is None else DiskTier.of(opened, pool_memory, changes)
    host = None if host_memory is None else HostTier.of(host_memory, pool_memory, changes, disk)
    return PageTiers(pool_memory, host, disk, changes, wants_disk=wants_disk)


def share_of(group: GroupKind, cache: CacheConfig, layout: PoolLayout) -> CacheConfig:
    """Returns the settings of a page group's tiers: it has the same share of each tier as of the pool."""
    if len(layout.regions) == 1:
        return cache
    share = layout.share(group)
    return cache.replace(
        host_cache_bytes=int(cache.host_cache_bytes * share),
        disk_cache_bytes=int(cache.disk_cache_bytes * share),
        disk_write_mb_s=cache.disk_write_mb_s * share,
    )


def open_disk(
    cache: CacheConfig,
    worker_id: str,
    facts: LoadedModel,
    files: SegmentFiles | None = None,
    *,
    group: GroupKind = GroupKind.FULL,
) -> OpenedDisk | None:
    """Locks the worker's folder and reads its headers; None if the disk is in trouble. Raises ConfigError."""
    form = record_format(facts, group)
    root = Path(cache.disk_cache_dir or cache_dir() / "pages")
    files, started_s = files or SegmentFiles(), time.monotonic()
    try:
        own, probed_s = _claimed(model_folder(root, form.identity), worker_id, files, form)
        try:
            found = own.scan(files, form)
            page_time = PageTime(_read_s(files, found, form) if probed_s is None else probed_s)
        except BaseException:
            own.close()
            raise
    except OSError as error:
        if error.errno in MISTAKES:
            raise ConfigError(
                f"--disk-cache-dir {root} cannot be used: {error.strerror}", field="disk_cache_dir"
            ) from error
        log.warning("disk tier not opened folder=%s error=%s", root, error)
        return None
    log.info(
        "disk tier opened folder=%s pages=%d seconds=%.3f page_seconds=%.6f is_direct=%s",
        own.path, sum(len(segment.records) for segment in found), time.monotonic() - started_s,
        page_time.seconds, files.is_direct,
    )  # fmt: skip
    if probed_s is None:
        log.warning("disk is full, the tier keeps to the room that it has folder=%s", own.path)
    most_bytes = cache.disk_cache_bytes if probed_s is not None else _room_on_full_disk(cache, found, form)
    return OpenedDisk(files, form, own, found, page_time, most_bytes, cache.disk_write_mb_s * 1e6)


def _room_on_full_disk(cache: CacheConfig, found: Sequence[ScannedSegment], form: RecordFormat) -> int:
    """Returns the bytes that the tier may take where there is no room for a record: those of its segments."""
    records = sum(len(segment.records) for segment in found)
    return min(cache.disk_cache_bytes, max(records, LEAST_RECORDS) * form.record_bytes)


def record_format(facts: LoadedModel, group: GroupKind) -> RecordFormat:
    """Returns the format of the records of a group's pages; those of other groups are never read as these."""
    if group is GroupKind.FULL:
        return RecordFormat(identity_of(facts.fingerprint, str(facts.kv_form)), facts.page_bytes)
    form = f"{facts.kv_form};group={group.name.lower()}"
    return RecordFormat(identity_of(facts.fingerprint, form), facts.layout.page_sizes[group])


def _claimed(root: Path, worker_id: str, files: SegmentFiles, form: RecordFormat) -> tuple[SegmentFolder, float | None]:
    """Locks the worker's folder. Returns it with the seconds in which its disk reads a record (None: the disk is full).

    Raises ConfigError for a root that others may change. Raises OSError, ETIMEDOUT where the disk does not answer; a
    lock that the disk grants later is released.
    """

    def claim(_: None) -> tuple[SegmentFolder, float | None]:
        make_private(root)
        check_root(root.parent)
        own = claim_own(root, worker_id)
        try:
            return own, files.probe(own.path, form.record_bytes)
        except BaseException:
            own.close()
            raise

    claimed: Future[tuple[SegmentFolder, float | None]] = Future()
    thread = CopyThreads("tier-open", [None])
    thread.submit(claim, claimed)
    if not wait([claimed], ANSWER_S).done:  # the thread ends with the process, or when the disk answers
        claimed.add_done_callback(_give_back)
        raise OSError(errno.ETIMEDOUT, f"the disk does not answer within {ANSWER_S:g} s", str(root))
    thread.close()
    return claimed.result()


def _give_back(claimed: Future[tuple[SegmentFolder, float | None]]) -> None:
    if claimed.exception() is None:
        claimed.result()[0].close()


def _read_s(files: SegmentFiles, found: Sequence[ScannedSegment], form: RecordFormat) -> float:
    """Returns the seconds of reading a record that was found. Raises OSError, ENOSPC if there is none."""
    if not found:
        raise OSError(errno.ENOSPC, "the disk is full, and no pages are there")
    return files.time_to_read(found[-1].path, form.record_bytes)


def _host_memory(cache: CacheConfig, page_bytes: int) -> PageMemory:
    pages = enough_pages(cache.host_cache_bytes, page_bytes, least=1, flag="--host-cache")
    memory = PageMemory(pages, page_bytes, flag="--host-cache")
    memory.map_in()  # copies into it are made on the event loop
    return memory
