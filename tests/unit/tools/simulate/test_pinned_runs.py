"""A simulated run is its decisions: nothing that only makes the simulator faster changes a figure.

Each policy, and each part of a fleet that has its own code, plays one small trace. The figures are those of the first
version that was checked against live workers. They change only where a policy, a scheduler or a cost changes.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.unit.tools.simulate.fleet.fleets import BLOCK, SMALL, chats
from tools.simulate.fleet import results
from tools.simulate.fleet.results import SimulatedRun
from tools.simulate.fleet.routing.simulated_routing import RoutingSetup
from tools.simulate.fleet.shape import Death, Delays, DraftShape, Faults, FleetShape, RouterRestart, TierShape
from tools.simulate.fleet.simulation import simulate
from tools.simulate.rivals import RIVALS
from tools.simulate.variants import ALWAYS_LOCAL, ALWAYS_REMOTE, OURS, policy_of
from twostroke.base.ids import WorkerId

PINNED = Path(__file__).with_name("pinned_runs.json")
DIGITS = 9
"""Significant digits that are compared: libraries of other machines may round the last ones otherwise."""
TIGHT = dataclasses.replace(SMALL, prefill_pages=80, decode_pages=80)
FAULTS = Faults(
    event_drop=0.05,
    event_duplicate=0.05,
    event_reorder=0.05,
    deaths=(
        Death(worker=WorkerId("prefill-0"), at_s=2.0, back_at_s=3.0),
        Death(worker=WorkerId("decode-1"), at_s=3.0, back_at_s=4.0),
    ),
    router_restarts=(RouterRestart(router=0, at_s=4.5),),
)
POLICIES = ("round-robin", "least-requests", OURS, "kv-no-peers", ALWAYS_LOCAL, ALWAYS_REMOTE, *RIVALS)
FLEETS: Mapping[str, FleetShape] = {
    "local": dataclasses.replace(TIGHT, local_prefill=True),
    "routers": dataclasses.replace(TIGHT, routers=3, routers_by_turn=False),
    "noise": dataclasses.replace(TIGHT, noise=0.2),
    "drafts": dataclasses.replace(TIGHT, drafts=DraftShape.of_chances((0.9, 0.8), 0.7)),
    "tiers": dataclasses.replace(
        TIGHT, tiers=TierShape(host_bytes=40_000, disk_bytes=2 << 20, host_page_s=1e-4, disk_page_s=4e-4)
    ),
    "forms": dataclasses.replace(TIGHT, prefill_page_bytes=2000, conversion_page_s=0.001),
    "promise": dataclasses.replace(TIGHT, slo_ttft_s=0.15, slo_itl_s=0.05),
    "faults": dataclasses.replace(TIGHT, routers=2, delays=Delays(event_jitter_s=0.003), faults=FAULTS),
}
CASES = (*(f"policy {name}" for name in POLICIES), *(f"fleet {name}" for name in FLEETS))


def played(case: str) -> SimulatedRun:
    kind, _, name = case.partition(" ")
    policy, shape = (name, TIGHT) if kind == "policy" else (OURS, FLEETS[name])
    setup = RoutingSetup(policy, lambda: policy_of(policy), holds=kind == "fleet")
    return simulate(chats(40, every_s=0.1), shape, setup)


def figures(run: SimulatedRun) -> dict[str, Any]:
    """Returns what the run came to, each number to `DIGITS` digits."""
    ttfts_s = results.ttfts(run)
    places = sorted((each.index, each.decode, each.source, each.peer) for each in run.outcomes)
    numbers = {
        "ttft_p50_s": results.percentile(ttfts_s, 0.5),
        "ttft_p90_s": results.percentile(ttfts_s, 0.9),
        "ttft_sum_s": sum(ttfts_s),
        "finished_s": sum(each.finished_s or 0.0 for each in run.outcomes),
        "busy_s": sum(use.busy_s for use in run.workers),
        "predicted_s": sum(each.predicted_ttft_s or 0.0 for each in run.outcomes),
    }
    counts = {
        "answered": len(ttfts_s),
        "cached_tokens": sum(each.cached_tokens for each in run.outcomes),
        "pulled_pages": sum(use.pulled_pages for use in run.workers),
        "evicted_pages": sum(use.evicted_pages for use in run.workers),
        "prompt_tokens": sum(use.prompt_tokens for use in run.workers),
        "loaded_tokens": sum(sum(use.loaded_tokens.values()) for use in run.workers),
        "steps": sum(use.steps for use in run.workers),
        "gaps": run.gaps.tokens,
        "batches": run.events.batches,
        "decode_workers": "".join((decode or "-")[-1] for _, decode, _, _ in places),
        "page_sources": "".join((source or "-")[-1] for _, _, source, _ in places),
        "peers": sum(peer is not None for *_, peer in places),
    }
    return {name: float(f"{value or 0.0:.{DIGITS}g}") for name, value in numbers.items()} | counts


@pytest.mark.parametrize("case", CASES)
def test_a_small_run_has_the_figures_that_it_had(case: str) -> None:
    pinned = json.loads(PINNED.read_text(encoding="utf-8"))
    run = played(case)
    assert run.unequal_indexes == ()
    assert figures(run) == pinned[case]


def test_the_pinned_runs_reach_what_they_are_to_guard() -> None:
    pinned = json.loads(PINNED.read_text(encoding="utf-8"))
    assert set(pinned) == set(CASES)
    assert all(each["evicted_pages"] for each in pinned.values()), "pages are short"
    assert any(each["peers"] for each in pinned.values())
    assert any(each["answered"] < 40 for each in pinned.values()), "some are refused"
    assert len({json.dumps(each) for each in pinned.values()}) > len(CASES) // 2, f"with blocks of {BLOCK} tokens"
