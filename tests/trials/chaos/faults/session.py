"""Clusters one after the other, each broken many times; progress, verdict, JSON and tables."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.trials.chaos import page_section
from tests.trials.chaos.faults.answer import Transcript
from tests.trials.chaos.faults.bounds import overruns
from tests.trials.chaos.faults.client import Clients
from tests.trials.chaos.faults.leak_check import pool_rests
from tests.trials.chaos.faults.load import Load
from tests.trials.chaos.faults.options import FaultsOptions
from tests.trials.chaos.faults.outcome import Outcome, PoolRest, stale
from tests.trials.chaos.faults.report import Facts, summary, written
from tests.trials.chaos.faults.run import FaultRun
from tests.trials.chaos.faults.testbed import Bed, Served, testbed
from tests.trials.chaos.faults.trials import QUICK, QUICK_SECONDS, SECONDS, Trial, drawn, in_turns, trials
from tests.trials.chaos.injection.plan import Kind
from tests.trials.chaos.program import ClusterOptions
from twostroke.base.errors import ConfigError

SCHEMA_VERSION = 1
"""Version of the JSON; it is raised when a key changes its meaning."""
SLOW_S = 3.0
"""Longest wait for the next token that is not reported: longer is not a miss, but worth a look."""
PART_OF_DEFAULT = 5
"""One fault of so many is tried on the second cluster."""
DISK = "4M"
"""Room for some hundred pages of a paced model on the disk tier of each worker."""

PACED_LOAD = Load(tokens=60, prompt_letters=320, long_tokens=900)
REAL_LOAD = Load(tokens=40, prompt_letters=600, long_tokens=300)
SMALL_LOAD = replace(REAL_LOAD, long_tokens=900)


def run_session(options: FaultsOptions) -> int:
    """Exit status: 1 on any miss."""
    began_s = time.time()
    outcomes, rests = list[Outcome](), list[PoolRest]()
    try:
        asyncio.run(_Session(options, outcomes, rests).run())
    finally:
        facts = Facts.now(options.cluster, time.time() - began_s)
        options.report.tell(summary(outcomes, facts), _as_json(facts, outcomes, rests))
    is_whole = options.report.section == page_section.MATRIX
    options.report.publish(written(outcomes, facts, rests, is_whole=is_whole))
    return 1 if any(outcome.is_miss for outcome in outcomes) or overruns(outcomes)[0] else 0


def shared_out(options: FaultsOptions) -> list[tuple[str, list[Trial]]]:
    """The trials of each cluster: most of them on the first one. Pure. Raises ConfigError where there are none."""
    only = options.only or (QUICK if options.quick else ())
    draws = random.Random(f"share {options.cluster.seed}")
    first, *others = options.transports
    wanted = trials(_transport_of(first), options.cluster.seed, only, options.cluster.ranks)
    if not wanted:
        raise ConfigError(f"no fault of such a cluster is called {' or '.join(only)}", field="--only")
    if options.sample is not None:
        wanted = in_turns(drawn(wanted, options.sample, draws), draws)
    shares: list[tuple[str, list[Trial]]] = [(first, wanted)]
    for other in others:
        can = set(trials(_transport_of(other), options.cluster.seed, only, options.cluster.ranks))
        moved = {trial for trial in wanted if trial in can and draws.random() * PART_OF_DEFAULT < 1}
        shares[0] = (first, [trial for trial in shares[0][1] if trial not in moved])
        shares.append((other, [trial for trial in wanted if trial in moved]))
    return [share for share in shares if share[1]]


def _transport_of(transports: str) -> str:
    """The one that workers of one host take."""
    return transports.partition(",")[0] or "shm"


class _Session:
    def __init__(self, options: FaultsOptions, outcomes: list[Outcome], rests: list[PoolRest]) -> None:
        self._options = options
        self._outcomes = outcomes
        """Grows: whoever interrupts gets what there is."""
        self._rests = rests
        """What was left in the pools of each cluster after its last fault."""
        self._expected: dict[str, Transcript] = {}
        self._total = 0

    async def run(self) -> None:
        shares = shared_out(self._options)
        self._total = sum(len(wanted) for _, wanted in shares)
        for transports, wanted in shares:
            left = wanted
            while left:
                left = await self._one_cluster(transports, left)

    async def _one_cluster(self, transports: str, wanted: Sequence[Trial]) -> list[Trial]:
        """What it did not come to: a cluster in which something is left or missing is given up."""
        options, seconds = self._options.cluster, QUICK_SECONDS if self._options.short else SECONDS
        async with broken_cluster(options, transports, seconds) as (bed, logs, run):
            self._expected = await run.prepare(self._expected)
            for at, trial in enumerate(wanted):
                outcome = await run.one(trial, transports=transports, model=options.model)
                self._tell(outcome)
                if outcome.is_miss or (outcome.recovery_s or 0.0) > SLOW_S:
                    keep_logs(logs, options.logs, outcome)
                if outcome.left or outcome.missing:
                    return list(wanted[at + 1 :])
            self._rests += await pool_rests(bed)
        return []

    def _tell(self, outcome: Outcome) -> None:
        self._outcomes.append(outcome)
        waited = "" if outcome.recovery_s is None else f", {outcome.slowest} waited {outcome.recovery_s:.2f} s"
        met = "" if outcome.met is None else f", {outcome.met} met it again: {stale(outcome.refused)}"
        print(
            f"faults: {len(self._outcomes)}/{self._total} {outcome.trial} in {outcome.broken or 'nobody'}: "
            f"{outcome.streams} streams{waited}{met}, {outcome.took_s:.1f} s: {outcome.verdict}",
            file=sys.stderr,
            flush=True,
        )


@contextlib.asynccontextmanager
async def broken_cluster(
    options: ClusterOptions, transports: str, seconds: Mapping[Kind, float]
) -> AsyncIterator[tuple[Bed, Path, FaultRun]]:
    """Yields a cluster with a disk, the folder of its logs, and who breaks it. `seconds`: how long faults last."""
    load = PACED_LOAD if options.is_paced else SMALL_LOAD if options.is_small else REAL_LOAD
    with tempfile.TemporaryDirectory(prefix="tsf-") as folder:
        flags = [*options.flags(transports), "--disk-cache", DISK, "--disk-cache-dir", f"{folder}/pages"]
        served = Served(options.ranks, options.draft_model is not None, options.is_small)
        async with testbed(Path(folder), flags, options.environment, served) as (bed, logs):
            clients = Clients(routers=bed.routers, model=bed.model, patience_s=options.patience_s)
            run = FaultRun(bed, clients, load.with_seed(options.seed), seconds)
            try:
                yield bed, logs, run
            finally:
                await run.close()


def keep_logs(logs: Path, folder: Path | None, outcome: Outcome) -> None:
    """Copies the logs, where that is wanted: a cluster's own logs end with it."""
    if folder is None:
        return
    name = str(outcome.trial).replace("/", "-")
    with contextlib.suppress(shutil.Error):  # sockets are not files
        shutil.copytree(logs, folder / name, dirs_exist_ok=True, symlinks=True)


def _as_json(facts: Facts, outcomes: Sequence[Outcome], rests: Sequence[PoolRest]) -> dict[str, Any]:
    return {
        "schema_version": SCHEMA_VERSION,
        **dataclasses.asdict(facts),
        "overruns": overruns(outcomes)[0],
        "pools": [{**dataclasses.asdict(rest), "leaked": rest.leaked} for rest in rests],
        "outcomes": [
            {**dataclasses.asdict(outcome), "trial": str(outcome.trial), "verdict": outcome.verdict}
            for outcome in outcomes
        ],
    }
