"""One hostile client beside the honest one, after a baseline of the same run; and what is left in the server."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import psutil

from tests.trials.chaos.neighbours.honest import Honest, Seen
from tests.trials.chaos.neighbours.hostile import BUSY
from tests.trials.chaos.neighbours.site import Site, Usage
from twostroke.base.json_values import to_json

QUIET_S = 15.0
"""For memory, descriptors and requests to be given back after a hostile client has ended."""
START_S = 60.0
REPORT_S = 60.0
"""After its time, for a hostile client to end, on a machine that does other things."""
MOST_MORE_MB = 50.0
MOST_MORE_DESCRIPTORS = 8
MOST_MORE_THREADS = 8
ANSWERS = ("http", "grpc")


@dataclass(frozen=True, slots=True)
class Trial:
    entry: str
    sent: int
    cpu_s: float
    baseline: Seen
    seen: Seen
    left: list[str] = field(default_factory=list)
    """What did not come back: memory, descriptors, requests, processes."""
    more_mb: float = 0.0

    def answer_s(self, share: float) -> float:
        return percentile(answers(self.seen), share)

    def live_s(self, share: float) -> float:
        return percentile(self.seen.seconds["live"], share)


def answers(seen: Seen) -> list[float]:
    return [seconds for kind in ANSWERS for seconds in seen.seconds[kind]]


def percentile(values: Sequence[float], share: float) -> float:
    """The value that `share` of all do not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


class HostileProcess:
    """A process that plays one entry after the other."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def play(self, name: str, seconds: float, seed: int) -> asyncio.Task[dict[str, Any]]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([name, seconds, seed]).encode() + b"\n")
        await self._process.stdin.drain()
        return asyncio.create_task(self._report(seconds))

    async def _report(self, seconds: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = await asyncio.wait_for(self._process.stdout.readline(), seconds + REPORT_S)
        if not line:
            raise AssertionError("the hostile client has crashed")
        report: dict[str, Any] = json.loads(line)
        return report


@contextlib.asynccontextmanager
async def hostile_process(site: Site) -> AsyncIterator[HostileProcess]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.trials.chaos.neighbours.hostile"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.getcwd(), "GRPC_VERBOSITY": "NONE"},
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(to_json(site.hostile).encode() + b"\n")
        await asyncio.wait_for(process.stdout.readline(), START_S)
        yield HostileProcess(process)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def baseline(site: Site, hostile: HostileProcess, seconds: float) -> Seen:
    """What the honest client sees while nobody else asks, and as much of a core is used elsewhere."""
    playing = await hostile.play(BUSY, seconds, 0)
    seen = await Honest(site.honest).ask(seconds)
    await playing
    return seen


async def trial(site: Site, hostile: HostileProcess, name: str, seconds: float, seed: int, baseline_s: float) -> Trial:
    before = site.usage()
    quiet = await baseline(site, hostile, baseline_s)
    playing = await hostile.play(name, seconds, seed)
    seen = await Honest(site.honest).ask(seconds)
    said = await playing
    left, more_mb = await _left(site, before)
    if said["mistake"]:
        left = [*left, f"the entry has a mistake: {said['mistake']}"]
    return Trial(name, said["sent"], said["cpu_s"], quiet, seen, left, more_mb)


async def _left(site: Site, before: Usage) -> tuple[list[str], float]:
    """Returns what is left as soon as all is back, else after a while."""
    until_s = time.monotonic() + QUIET_S
    while True:
        left, more_mb = await asyncio.to_thread(_look, site, before)
        if not left or time.monotonic() > until_s:
            return left, more_mb
        await asyncio.sleep(0.25)


def _look(site: Site, before: Usage) -> tuple[list[str], float]:
    if dead := site.dead():
        return [f"{name} has died" for name in dead], 0.0
    try:
        now = site.usage()
        requests = site.open_requests()
    except (psutil.Error, OSError, ValueError) as error:
        return [f"the server does not say: {error}"], 0.0
    left = [f"{requests:.0f} requests are open"] if requests else []
    more_mb = {name: now.resident_mb[name] - before.resident_mb[name] for name in before.resident_mb}
    left += [f"{name} has {more:.0f} MB more" for name, more in more_mb.items() if more > MOST_MORE_MB]
    for name in before.pids:
        more = now.descriptors[name] - before.descriptors[name]
        threads = now.threads[name] - before.threads[name]
        if more > MOST_MORE_DESCRIPTORS:
            left.append(f"{name} has {more} descriptors more")
        if threads > MOST_MORE_THREADS:
            left.append(f"{name} has {threads} threads more")
    return left, max(more_mb.values())
