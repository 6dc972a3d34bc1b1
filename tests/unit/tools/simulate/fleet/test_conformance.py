"""What simulated workers do at once, live ones do step by step and message by message: the histories are the same."""

from __future__ import annotations

import dataclasses
import random
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import pytest

from router.routing.policies import RECONSIDERING, policy_named
from tests.unit.tools.simulate.fleet.fleets import ALONE, BLOCK, SMALL, row, trace
from tests.unit.tools.simulate.fleet.live_parts import LiveParts
from tools.simulate.fleet.results import SimulatedRun, tier_hit_rate
from tools.simulate.fleet.routing.simulated_routing import RoutingSetup
from tools.simulate.fleet.shape import Death, DraftShape, Faults, FleetShape, TierShape
from tools.simulate.fleet.simulation import simulate
from tools.simulate.fleet.worker.host import FastParts, Parts, SimulatedHost
from tools.simulate.fleet.worker.steps import Flight
from tools.simulate.traces.trace import Trace
from twostroke.base.ids import BlockHash, WorkerId
from twostroke.kv_cache.tier import Tier
from twostroke.scheduler.values import AdmittedSequence
from twostroke.worker.tiers.metrics import TierMetrics

History = dict[tuple[str, str], list[tuple[float, object]]]
"""Worker and kind of event -> what happened when."""


def played(of: Trace, shape: FleetShape, policy: str, parts: Parts, monkeypatch: pytest.MonkeyPatch) -> Any:
    history: History = defaultdict(list)

    def note(host: SimulatedHost, kind: str, what: object) -> None:
        history[host.worker, kind].append((host.queue.now_s, what))

    class Noted(SimulatedHost):
        def admitted(self, admission: AdmittedSequence) -> None:
            note(self, "admitted", (admission.sequence.request_id, tuple(admission.missing)))
            super().admitted(admission)

        def preempted(self) -> None:
            note(self, "preempted", None)
            super().preempted()

        def ran(self, flight: Flight) -> None:
            for step in range(flight.steps):
                chunks = [(c.sequence.request_id, c.start + step, c.end + step) for c in flight.step.chunks]
                history[self.worker, "step"].append((flight.begun_s + flight.after(step + 1), chunks))
            super().ran(flight)

        def stored(self, names: Sequence[BlockHash]) -> None:
            for name in names:
                note(self, "stored", name)
            super().stored(names)

        def removed(self, names: Sequence[BlockHash]) -> None:
            for name in names:
                note(self, "removed", name)
            super().removed(names)

    with monkeypatch.context() as patch:
        patch.setattr("tools.simulate.fleet.worker.worker_lifecycle.SimulatedHost", Noted)
        patch.setattr("twostroke.worker.condition.GATHER_S", 0.0)  # simulated pulls tell of every step
        setup = RoutingSetup(policy, lambda: policy_named(policy), holds=policy in RECONSIDERING)
        return history, simulate(of, shape, setup, parts=parts)


def check(of: Trace, shape: FleetShape, policy: str, monkeypatch: pytest.MonkeyPatch) -> SimulatedRun:
    fast, fast_run = played(of, shape, policy, FastParts(), monkeypatch)
    live, live_run = played(of, shape, policy, LiveParts(), monkeypatch)
    assert fast.keys() == live.keys()
    for key, events in fast.items():
        for number, ((fast_s, what), (live_s, live_what)) in enumerate(zip(events, live[key], strict=False)):
            place = f"{key} {number} at {fast_s:.6f} s"
            assert what == live_what, place
            assert fast_s == pytest.approx(live_s, abs=1e-6), place
        assert len(events) == len(live[key]), key
    for one, other in zip(fast_run.outcomes, live_run.outcomes, strict=True):
        assert (one.decode, one.source, one.peer, one.cached_tokens) == (
            other.decode, other.source, other.peer, other.cached_tokens,
        )  # fmt: skip
        assert one.finished_s == pytest.approx(other.finished_s, abs=1e-6)
    return fast_run


def requests(seed: int, count: int = 40, every_s: float = 0.1) -> Trace:
    """Chats with common beginnings, at times that no two events share."""
    draws = random.Random(seed)
    rows = []
    for number in range(count):
        tokens = draws.randrange(20, 500)
        tokens += tokens % BLOCK == 0
        at_s = (number + draws.random()) * every_s
        rows.append(row(at_s, tokens, draws.randrange(1, 40), draws.randrange(8), shared=draws.choice([0, 4])))
    return trace(rows)


@pytest.mark.parametrize(
    ("seed", "policy"),
    [
        (1, "kv"),
        (2, "round-robin"),
        (1, "least-requests"),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in ((2, "kv"), (1, "round-robin"), (2, "least-requests"))
        ),
    ],
)
def test_both_play_the_same_histories(seed: int, policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check(requests(seed), SMALL, policy, monkeypatch)


def test_both_preempt_and_evict_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    tight = dataclasses.replace(SMALL, decode_pages=60, prefill_pages=60)
    run = check(requests(3, every_s=0.05), tight, "round-robin", monkeypatch)
    assert sum(use.preemptions for use in run.workers) > 0
    assert sum(use.evicted_pages for use in run.workers) > 0


def test_both_pull_from_peers_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = dataclasses.replace(SMALL, page_bytes=10)
    burst = [row(3 + index * 0.0013, 20 * BLOCK + 2, 2, index % 2, shared=18) for index in range(12)]
    run = check(trace([row(0.0, 20 * BLOCK + 2, 2, 9, shared=18), *burst]), shape, "kv", monkeypatch)
    assert any(outcome.peer is not None for outcome in run.outcomes)


def test_both_compute_prompts_locally_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = dataclasses.replace(SMALL, prefill=1, local_prefill=True)
    check(requests(4, every_s=0.05), shape, "round-robin", monkeypatch)


@pytest.mark.parametrize("acceptance", [(0.9,), (0.5, 0.9, 0.2)])
def test_both_draft_alike(acceptance: tuple[float, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    shape = dataclasses.replace(SMALL, local_prefill=True, drafts=DraftShape.of_chances(acceptance, share=0.8))
    check(requests(6, every_s=0.05), shape, "kv", monkeypatch)


def test_both_load_from_tiers_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    tiers = TierShape(host_bytes=20_000, disk_bytes=2 << 20, host_page_s=0.0011, disk_page_s=0.0037)
    tight = dataclasses.replace(SMALL, decode_pages=80, prefill_pages=60, tiers=tiers)
    run = check(requests(7, every_s=0.2), tight, "kv", monkeypatch)
    assert all(tier_hit_rate(run, tier) > 0.01 for tier in (Tier.HOST, Tier.DISK))
    assert run.unequal_indexes == ()


@pytest.mark.parametrize("host_bytes", [0, 40_000])
def test_both_prefetch_alike_for_requests_that_wait(host_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One sequence runs at once. The others' blocks come from disk meanwhile: to host memory, or without it to pages
    that are free since the worker came back."""
    prefetched: list[int] = []
    monkeypatch.setattr(TierMetrics, "prefetched", lambda self, tier, pages: prefetched.append(pages))
    tiers = TierShape(host_bytes=host_bytes, disk_bytes=2 << 20, host_page_s=0.0011, disk_page_s=0.0037)
    death = Death(worker=WorkerId("decode-0"), at_s=30.0, back_at_s=31.0)
    narrow = dataclasses.replace(ALONE, max_num_seqs=1, tiers=tiers, faults=Faults(deaths=(death,)))
    rows = [row(at_s + 0.1 * chat, 300 + chat, 8, chat) for at_s in (0.0, 20.0, 40.0) for chat in range(6)]
    run = check(trace(rows), narrow, "round-robin", monkeypatch)
    count = len(prefetched)
    assert count > 0
    assert prefetched[: count // 2] == prefetched[count // 2 :], "the fast run's, then the live one's"
    assert run.unequal_indexes == ()
