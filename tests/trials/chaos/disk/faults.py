"""What is tried with the disk, one function for each row of the table, and what was seen of it."""

from __future__ import annotations

import asyncio
import errno
import random
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from tests.cluster.lent import forget_cached
from tests.trials.chaos.disk import damage
from tests.trials.chaos.disk.bed import DiskBed
from tests.trials.chaos.disk.chats import Turn, identical
from twostroke.kv_cache.tiers.record import record_bytes

UNDER_WAY_S = 0.3
"""Time after which chats are under way."""
SLOW_S = 0.1
FIRST_HIT_S = 30.0
BORDERS = 12
"""Lengths that are tried on a whole cluster; `test_records.py` tries every one."""
ONE_WARNING = "disk tier turned off"


@dataclass(frozen=True, slots=True)
class Seen:
    streams: int
    identical: int
    text: str
    """What else there was to see."""
    problem: str = ""
    """Why this is not good enough."""


Deed = Callable[[DiskBed, Sequence[Turn]], Awaitable[Seen]]
"""`bed`, and the same chats in a cluster without a disk."""


@dataclass(frozen=True, slots=True)
class DiskFault:
    name: str
    tried: str
    deed: Deed


async def killed(bed: DiskBed, baseline: Sequence[Turn]) -> Seen:
    del baseline
    on_disk = await bed.written()
    talking = asyncio.create_task(bed.talk())
    await asyncio.sleep(UNDER_WAY_S)
    killed_s = time.monotonic()
    await bed.kill()
    await bed.restart()
    serving_s = time.monotonic()
    hit_s = await asyncio.wait_for(bed.until_loaded(), FIRST_HIT_S)
    got = await talking
    announced = await bed.announced()
    failures = await bed.counted("verification_failures_total")
    text = (
        f"{on_disk} blocks on disk before; the new epochs serve {serving_s - killed_s:.2f} s after the kill, and have "
        f"announced {announced} blocks by the end, proved equal; first page from disk {hit_s - serving_s:.2f} s after "
        f"they serve; {await bed.counted('loaded_pages_total'):.0f} pages loaded, {failures:.0f} damaged"
    )
    return _seen(bed, got, text, "a page was damaged" if failures else "")


async def power_lost(bed: DiskBed, baseline: Sequence[Turn]) -> Seen:
    del baseline
    got, lengths, draws = list[Turn](), 0, random.Random(3)
    last = damage.segments(bed.folder)[-1]
    records = last.stat().st_size // record_bytes(bed.page_bytes)
    wanted = sorted(draws.sample(sorted(set(damage.borders(records, bed.page_bytes))), BORDERS), reverse=True)
    for length in wanted:
        await bed.kill()
        for path in damage.segments(bed.folder)[-2:]:
            damage.cut(path, min(length, path.stat().st_size))
        await bed.restart()
        got += await bed.talk(chats=2, turns=2)
        lengths += 1
    failures = await bed.counted("verification_failures_total")
    text = (
        f"{lengths} lengths, at and beside the borders of headers, pages, sectors and records; {failures:.0f} damaged"
    )
    return _seen(bed, got, text)


async def bits_flipped(bed: DiskBed, baseline: Sequence[Turn]) -> Seen:
    del baseline
    before = await bed.written()
    await bed.kill()
    draws, flipped = random.Random(4), dict.fromkeys(damage.PARTS, 0)
    for path in damage.segments(bed.folder):
        for part, count in damage.flip_in_every_record(path, bed.page_bytes, draws).items():
            flipped[part] += count
    await bed.restart()
    announced = await bed.announced()
    got = await bed.talk()
    failures = await bed.counted("verification_failures_total")
    parts = ", ".join(f"{count} in a {part}" for part, count in flipped.items())
    text = (
        f"{sum(flipped.values())} bits ({parts}); {announced} of {before} blocks announced at start, "
        f"the headers of the others were wrong; {failures:.0f} pages found damaged when they were read, none used"
    )
    return _seen(bed, got, text, "" if failures else "no page was found damaged")


async def form_changed(bed: DiskBed, baseline: Sequence[Turn]) -> Seen:
    del baseline
    before = await bed.written()
    configs = {name: worker.config for name, worker in bed.cluster.workers.items()}
    await bed.kill()
    for name, config in configs.items():
        cache = config.cache.replace(kv_format="float16")
        await bed.cluster.start_worker(config.role, name, config.incarnation + 1, cache=cache)
    changed = int(await bed.counted("blocks"))
    await bed.kill()
    for name, config in configs.items():
        await bed.cluster.start_worker(config.role, name, config.incarnation + 2, cache=config.cache)
    back = await bed.announced()
    got = await bed.talk()
    text = f"{changed} blocks found in float16, {back} of {before} again in the form they were written in"
    return _seen(bed, got, text, "records of another form were used" if changed or not back else "")


async def disk_full(bed: DiskBed, baseline: Sequence[Turn]) -> Seen:
    return await _fails(bed, baseline, write_errno=errno.ENOSPC)


async def reads_fail(bed: DiskBed, baseline: Sequence[Turn]) -> Seen:
    return await _fails(bed, baseline, read_errno=errno.EIO)


async def writes_fail(bed: DiskBed, baseline: Sequence[Turn]) -> Seen:
    return await _fails(bed, baseline, write_errno=errno.EIO)


async def disk_slow(bed: DiskBed, baseline: Sequence[Turn]) -> Seen:
    counters = ("refused_loads_total", "given_up_loads_total", "loaded_pages_total")
    before = [await bed.counted(each) for each in counters]
    bed.disk(read_delay_s=SLOW_S)
    got = await bed.talk()
    after = [await bed.counted(each) for each in counters]
    refused, given_up, loaded = (later - earlier for earlier, later in zip(before, after, strict=True))
    text = (
        f"{_against(got, baseline)}; {refused:.0f} loads not begun, {given_up:.0f} given up, {loaded:.0f} pages loaded"
    )
    return _seen(bed, got, text, "" if refused + given_up else "no load met the slow disk")


async def _fails(bed: DiskBed, baseline: Sequence[Turn], **said: int) -> Seen:
    """What is forgotten when the fault begins is computed again, so that there is something to write, and to read."""
    talking = asyncio.create_task(bed.talk())
    await asyncio.sleep(UNDER_WAY_S)
    bed.disk(**said)
    got = [*await talking, *await bed.talk()]
    if "write_errno" in said:
        await forget_cached(bed.cluster)
        got += await bed.talk()
    up, warnings = await bed.counted("up"), bed.warnings(ONE_WARNING)
    text = f"tier up at {up:.0f} of 2 workers, {warnings} warnings in all; {_against(got, baseline)}"
    return _seen(bed, got, text, "" if up < 2 and warnings == 2 - up else "the tier is not off with one warning")


def _against(got: Sequence[Turn], baseline: Sequence[Turn]) -> str:
    """Says how long first tokens took, against the same chats without a disk, from the second turn on."""
    ours, theirs = (statistics.median(each.first_token_s for each in turns if each.turn) for turns in (got, baseline))
    return f"median first token {1e3 * ours:.0f} ms, {1e3 * theirs:.0f} ms without a disk ({ours / theirs:.2f})"


def _seen(bed: DiskBed, got: Sequence[Turn], text: str, problem: str = "") -> Seen:
    right = identical(bed.expected, got)
    return Seen(len(got), right, text, problem if right == len(got) else f"{len(got) - right} answers differ")


FAULTS: tuple[DiskFault, ...] = (
    DiskFault("SIGKILL under chats", "all workers are killed in the middle of a turn, and started again", killed),
    DiskFault("power loss", "workers are killed, and the last two segments cut at so many lengths", power_lost),
    DiskFault("flipped bits", "workers are killed, and one bit of every record of every segment flips", bits_flipped),
    DiskFault("changed form", "workers are started with `--kv-format float16`, and then again as before", form_changed),
    DiskFault("full disk", "writes fail with ENOSPC while chats are under way", disk_full),
    DiskFault("EIO of reads", "reads fail with EIO while chats are under way", reads_fail),
    DiskFault("EIO of writes", "writes fail with EIO while chats are under way", writes_fail),
    DiskFault("slow disk", "every read takes 100 ms from now on", disk_slow),
)
