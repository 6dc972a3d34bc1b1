"""One subject in a process of its own: `python -m tests.trials.bench.index.trial SUBJECT WORKERS BLOCKS LOOKUPS SEED`.

Prints one line of JSON. Runs in the environment of whatever it measures, so it needs nothing else installed.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import islice

import psutil

from tests.trials.bench.index.content import DEEP_BLOCKS, SHALLOW_BLOCKS, Content
from tests.trials.bench.index.subjects import Subject, subject_named

PREPARED = 4096
"""Messages made at a time, so that making them is not timed and keeping them is not weighed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lookup:
    depth: int
    popular: bool
    """Every worker holds some of it."""
    p50_s: float
    p99_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    subject: str
    version: str
    holdings: int
    """(block, holder)"""
    bytes_per_holding: float
    ingest_s: float
    """CPU time per (block, holder), decoding included."""
    lookups: tuple[Lookup, ...]


def measure(name: str, content: Content, lookups: int) -> Trial:
    subject = subject_named(name, content.workers)
    gc.collect()
    empty_bytes, holdings, busy_s = _resident_bytes(), 0, 0.0
    stored = content.stored()
    while part := list(islice(stored, PREPARED)):
        messages = [(stored.worker, subject.message(stored)) for stored in part]
        holdings += sum(len(stored.block_hashes) for stored in part)
        started_s = time.process_time()
        for worker, message in messages:
            subject.learn(worker, message)
        busy_s += time.process_time() - started_s
    del part, messages
    gc.collect()
    grown_bytes = _resident_bytes() - empty_bytes
    return Trial(
        subject=name,
        version=subject.version,
        holdings=holdings,
        bytes_per_holding=grown_bytes / holdings,
        ingest_s=busy_s / holdings,
        lookups=tuple(_lookups(subject, content, lookups)),
    )


def _lookups(subject: Subject, content: Content, count: int) -> Iterator[Lookup]:
    for depth in (SHALLOW_BLOCKS, DEEP_BLOCKS):
        for popular in (False, True):
            taken_s = []
            for asked in content.questions(depth, count, popular=popular):
                question = subject.question(asked.block_hashes)
                started_s = time.perf_counter()
                answer = subject.answer(question)
                taken_s.append(time.perf_counter() - started_s)
                found = subject.depths(answer)
                if found != asked.depths:
                    raise SystemExit(f"wrong answer at depth {depth}: {found}, should be {asked.depths}")
            centiles_s = statistics.quantiles(taken_s, n=100)
            yield Lookup(depth=depth, popular=popular, p50_s=centiles_s[49], p99_s=centiles_s[98])


def _resident_bytes() -> int:
    return int(psutil.Process().memory_info().rss)


def main() -> None:
    name = sys.argv[1]
    workers, blocks, lookups, seed = (int(text) for text in sys.argv[2:])
    print(json.dumps(asdict(measure(name, Content(workers=workers, blocks=blocks, seed=seed), lookups))))


if __name__ == "__main__":
    main()
