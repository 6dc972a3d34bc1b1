"""Plays one target for a while: with atheris (libFuzzer, led by coverage) where it is there, else by chance alone.

A process of its own per target: `python -m tests.trials.chaos.fuzz.engine NAME --for SECONDS --finds FOLDER`. It ends
with a line of JSON; an input that breaks something is left in FOLDER and the exit status is not zero.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.util
import json
import logging
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from tests.trials.chaos.fuzz.target import Target

INSTRUMENTED = ("twostroke.transfer", "twostroke.rpc", "twostroke.base.ids", "twostroke.faults", "router", "msgpack")
LARGEST_GROWTH_BYTES = 192 << 20
"""Largest growth of a process's memory after its first tenth: caches of libraries and a corpus in memory take some."""


def play(target: Target, seconds: float, seed: int, finds: Path | None = None) -> int:
    """Tries for so long, and the corpus first; returns how many. Raises what must never happen, naming the input."""
    draw = random.Random(seed)
    corpus = target.corpus
    tries = 0
    with target.opened() as attempt:
        ends_at = time.monotonic() + seconds
        for data in _inputs(target, corpus, draw):
            try:
                attempt(data)
            except BaseException as error:
                error.add_note(f"fuzz target {target.name}, seed {seed}, input {data[:2000]!r}")
                if finds is not None:
                    save(finds, target, data)
                raise
            tries += 1
            if time.monotonic() > ends_at and tries >= len(corpus):
                return tries
    raise AssertionError("inputs never end")


def save(finds: Path, target: Target, data: bytes) -> None:
    folder = finds / target.name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"crash-{hashlib.sha256(data).hexdigest()[:16]}").write_bytes(data)


def _inputs(target: Target, corpus: list[bytes], draw: random.Random) -> Iterator[bytes]:
    yield from corpus
    while True:
        data = draw.choice(corpus)
        for _ in range(draw.choice((1, 1, 1, 2, 3, 6))):
            data = target.mutate(data, draw)
        yield data


def _play_led_by_coverage(atheris: Any, target: Target, seconds: float, seed: int, finds: Path) -> int:
    """libFuzzer ends the process itself: what is to be told is told while it runs."""
    grown = finds / target.name / "corpus"
    grown.mkdir(parents=True, exist_ok=True)
    tries = 0
    ends_at = time.monotonic() + seconds
    report_at = time.monotonic()

    with target.opened() as attempt:

        def once(data: bytes) -> None:
            nonlocal tries, report_at
            attempt(data)
            tries += 1
            if (now := time.monotonic()) > report_at:
                report_at = now + min(5.0, max(0.2, ends_at - now - 0.5))
                _tell(target, tries, led=True)

        def mutate(data: bytes, max_size: int, seed: int) -> bytes:
            draw = random.Random(seed)
            if draw.randrange(4) == 0:
                return bytes(atheris.Mutate(data, max_size))
            return target.mutate(data, draw)[:max_size]

        for index, data in enumerate(target.corpus):
            (grown / f"seed-{index}").write_bytes(data)
        flags = [f"-max_total_time={int(seconds)}", f"-artifact_prefix={finds / target.name}/", f"-seed={seed}"]
        limits = ["-max_len=65536", "-timeout=20", "-rss_limit_mb=3000", "-verbosity=0"]
        atheris.Setup([sys.argv[0], *flags, *limits, str(grown)], once, custom_mutator=mutate)
        atheris.Fuzz()
    return tries


def _tell(target: Target, tries: int, *, led: bool) -> None:
    print(json.dumps({"target": target.name, "tries": tries, "coverage": led}), flush=True)


def _resident_bytes() -> int:
    return int(psutil.Process().memory_info().rss)


def _play_by_chance(target: Target, seconds: float, seed: int, finds: Path) -> int:
    tries = play(target, seconds / 10, seed, finds)
    before = _resident_bytes()
    tries += play(target, seconds * 9 / 10, seed + 1, finds)
    grown = _resident_bytes() - before
    assert grown < LARGEST_GROWTH_BYTES, f"memory of {target.name} grew by {grown} bytes in {tries} tries"
    return tries


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("targets", nargs="+", help="one after the other; led by coverage only where there is one")
    parser.add_argument("--for", dest="seconds", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--finds", type=Path, required=True)
    parser.add_argument("--by-chance", action="store_true")
    wanted = parser.parse_args()
    logging.disable(logging.CRITICAL)
    atheris = None
    if not wanted.by_chance and importlib.util.find_spec("atheris") is not None:
        import atheris  # type: ignore[no-redef,import-not-found]
    with contextlib.nullcontext() if atheris is None else atheris.instrument_imports(include=list(INSTRUMENTED)):
        targets = _targets()
    for name in wanted.targets:
        target = targets[name]
        if atheris is not None and not target.is_live:
            _play_led_by_coverage(atheris, target, wanted.seconds, wanted.seed, wanted.finds)
        else:
            _tell(target, _play_by_chance(target, wanted.seconds, wanted.seed, wanted.finds), led=False)
    return 0


def _targets() -> dict[str, Target]:
    from tests.trials.chaos.fuzz.targets import TARGETS  # after the instrumentation has begun

    return {target.name: target for target in TARGETS}


if __name__ == "__main__":
    sys.exit(main())
