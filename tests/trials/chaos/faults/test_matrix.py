"""The matrix's own machinery on a small cluster: no client notices a fault, and with a guard off the matrix does."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.trials.chaos.faults.client import Clients
from tests.trials.chaos.faults.load import Load
from tests.trials.chaos.faults.outcome import Outcome
from tests.trials.chaos.faults.run import FaultRun
from tests.trials.chaos.faults.small_cluster import restarting_cluster
from tests.trials.chaos.faults.testbed import Bed
from tests.trials.chaos.faults.trials import QUICK, QUICK_SECONDS, Trial
from tests.trials.chaos.injection.plan import Guard, Kind

LOAD = Load(tokens=50, prompt_letters=320, long_tokens=600, seed=3)
PATIENCE_S = 1.5
"""Patience of clients: half as long as a router is frozen, so that another one has their streams when it wakes up."""
IN_GATE = ("decode/pull.announced/stop", "prefill/transport.serving/corrupt")
"""Half of tests/cluster kills routers, decode and prefill workers within streams."""
TRIES = 3
NOTICED = (
    (Guard.RESUME, "router/router.token/kill"),
    (Guard.DIGESTS, "decode/pull.asking/corrupt"),
    (Guard.FENCING, "decode/pull.announced/stop"),
)


async def outcome_of(run: FaultRun, bed: Bed, text: str) -> Outcome:
    process, point, kind = text.split("/")
    return await run.one(Trial(process, point, Kind(kind)), transports="", model=bed.model)


async def is_noticed(run: FaultRun, bed: Bed, text: str) -> bool:
    """Not each time that nothing prevents it does a fault do harm."""
    for _ in range(TRIES):
        outcome = await outcome_of(run, bed, text)
        assert outcome.has_happened
        if outcome.is_lossy:
            return True
    return False


@contextlib.asynccontextmanager
async def running(patch: pytest.MonkeyPatch, folder: Path) -> AsyncIterator[tuple[FaultRun, Bed]]:
    """One cluster for all faults: to start it takes longer than to break it."""
    async with restarting_cluster(patch, folder, decode=2) as bed:
        run = FaultRun(bed, Clients(routers=bed.routers, model=bed.model, patience_s=PATIENCE_S), LOAD, QUICK_SECONDS)
        await run.prepare({})
        yield run, bed


@pytest.mark.parametrize("names", [IN_GATE, pytest.param(QUICK, marks=pytest.mark.slow)], ids=["some", "all"])
async def test_no_client_notices_a_fault(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, names: tuple[str, ...]
) -> None:
    async with running(monkeypatch, tmp_path) as (run, bed):
        for name in names:
            outcome = await outcome_of(run, bed, name)
            assert outcome.verdict == "ok", (name, outcome.verdict)


@pytest.mark.slow
async def test_with_a_guard_off_the_matrix_notices(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async with running(monkeypatch, tmp_path) as (run, bed):
        for guard, name in NOTICED:
            await bed.forget_cached()
            _, wrong = await run.undisturbed(0.0001)
            assert wrong == [], f"before {guard}, with all guards on"
            await bed.switch_off(guard)
            assert await is_noticed(run, bed, name), guard
            await bed.switch_off(None)
