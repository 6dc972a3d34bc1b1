"""Runs mutants on several benches, and tells what came of them."""

from __future__ import annotations

import fnmatch
import queue
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from tests.mutants.bench import ALL_S, PASSED, Bench, Result, Verdict
from tests.mutants.mutant import Mutant
from tests.mutants.table import MUTANTS


def chosen(patterns: Sequence[str]) -> list[Mutant]:
    """Returns the mutants whose name or file one of the patterns matches; all of them where there is none."""
    if not patterns:
        return list(MUTANTS)
    return [
        mutant
        for mutant in MUTANTS
        if any(fnmatch.fnmatch(of, each) for each in patterns for of in (mutant.name, mutant.file))
    ]


def run(mutants: Sequence[Mutant], jobs: int) -> int:
    """Returns 0 if every mutant is noticed, by tests that pass without one."""
    began_s, results = time.monotonic(), list[Result]()
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        benches = [Bench(Path(folder) / str(number)) for number in range(min(jobs, len(mutants)))]
        sound = benches[0].run(sorted({mutant.test for mutant in mutants}), ALL_S)
        if sound.status != PASSED:
            print(f"without any mutant the tests do not pass:\n{sound.output}", file=sys.stderr)
            return 1
        _tell(f"without any mutant: {sound.last_line}")
        left: queue.SimpleQueue[Mutant] = queue.SimpleQueue()
        for mutant in mutants:
            left.put(mutant)
        threads = [threading.Thread(target=_work, args=(bench, left, results)) for bench in benches]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    print(summary(results, time.monotonic() - began_s))
    return 0 if all(result.verdict is Verdict.NOTICED for result in results) else 1


def summary(results: Sequence[Result], seconds: float) -> str:
    """Returns a table of the results, those first that nobody noticed, and one line about all."""
    width = max((len(result.mutant.name) for result in results), default=0)
    rows = sorted(
        results, key=lambda result: (result.verdict is Verdict.NOTICED, result.mutant.file, result.mutant.name)
    )
    lines = [
        f"{result.mutant.name:{width}}  {result.verdict:11}  {result.seconds:5.1f} s  {result.mutant.test}"
        for result in rows
    ]
    noticed = sum(result.verdict is Verdict.NOTICED for result in results)
    lines += [
        f"{result.mutant.name}: {result.mutant.claim}\n    {result.said}"
        for result in rows
        if result.verdict is not Verdict.NOTICED
    ]
    return "\n".join([*lines, f"{noticed} of {len(results)} mutants noticed, {seconds:.0f} s"])


def _work(bench: Bench, left: queue.SimpleQueue[Mutant], results: list[Result]) -> None:
    while True:
        try:
            mutant = left.get_nowait()
        except queue.Empty:
            return
        result = bench.try_out(mutant)
        results.append(result)
        _tell(f"{len(results)}: {mutant.name} {result.verdict} ({result.seconds:.1f} s)")


def _tell(line: str) -> None:
    print(f"mutants: {line}", file=sys.stderr, flush=True)
