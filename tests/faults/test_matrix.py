"""The matrix's own machinery on a small cluster: no client notices a fault, and with a guard off the matrix does."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.faults.client import Clients
from cluster.faults.load import Load
from cluster.faults.play import Player
from cluster.faults.testbed import Bed
from cluster.faults.trials import QUICK, QUICK_SECONDS, Trial
from tests.faults.kept import kept_cluster
from twostroke.faults.plan import Guard, Kind

LOAD = Load(tokens=50, prompt_letters=320, seed=3)


def trial(text: str) -> Trial:
    process, point, kind = text.split("/")
    return Trial(process, point, Kind(kind))


async def prepared(bed: Bed) -> Player:
    player = Player(bed, Clients(routers=bed.routers, model=bed.model, patience_s=3.0), LOAD, QUICK_SECONDS)
    await player.prepare({})
    return player


async def test_no_client_notices_a_fault_and_nothing_is_left_behind(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async with kept_cluster(monkeypatch, tmp_path, decode=2) as bed:
        player = await prepared(bed)
        for name in QUICK:
            outcome = await player.play(trial(name), transports="", model=bed.model)
            assert outcome.verdict == "ok", outcome


@pytest.mark.parametrize(
    ("off", "name"),
    [
        (Guard.RESUME, "router/router.token/kill"),
        (Guard.DIGESTS, "decode/pull.asking/corrupt"),
        (Guard.FENCING, "decode/pull.announced/stop"),
    ],
)
async def test_the_matrix_notices_what_the_guards_prevent(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, off: Guard, name: str
) -> None:
    async with kept_cluster(monkeypatch, tmp_path, decode=1 + (off is Guard.FENCING), off=off) as bed:
        player = await prepared(bed)
        outcome = await player.play(trial(name), transports="", model=bed.model)
        assert outcome.has_happened
        assert outcome.is_lossy
