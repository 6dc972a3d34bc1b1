"""A disk about as fast as computing brings the last blocks while the first ones are computed, until both meet.

The live loads run on a simulated worker in virtual time: on a busy machine nothing takes as long as was planned.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest

from tests.unit.tools.simulate.fleet.fleets import ALONE, BLOCK, row, run, trace
from tools.simulate.fleet.shape import TierShape
from tools.simulate.fleet.worker.host import SimulatedHost
from tools.simulate.fleet.worker.steps import Flight
from tools.simulate.fleet.worker.tiers import SimulatedReader, SimulatedTiers
from twostroke.base.ids import BlockHash
from twostroke.kv_cache.tier import Tier
from twostroke.worker.tiers.metrics import TierMetrics

COUNT = 40
COMPUTE_S = 0.0195
"""Time of computing a block (`fleets.COST`)."""
OTHER_S, AGAIN_S = 10.0, 20.0
"""When a prompt comes that takes all pages of the first one, and when the first one comes again."""
TIERS = TierShape(disk_bytes=4 << 20, disk_page_s=COMPUTE_S, disk_write_bytes_per_s=1e9)
NEVER_S = 1e6


@dataclasses.dataclass
class Done:
    """What was done for a prompt that came again while its pages were on disk alone."""

    chain: list[BlockHash] = dataclasses.field(default_factory=list)
    loaded: list[int] = dataclasses.field(default_factory=list)
    """Its blocks that came from disk, in this order."""
    computed_tokens: int = 0
    not_loaded: list[str] = dataclasses.field(default_factory=list)
    """What was counted of loads that were not begun, and of those that were given up."""


def asked_again(patch: pytest.MonkeyPatch, read_s: float = COMPUTE_S) -> Done:
    """Asks for the prompt when a page takes so long to be read; the worker has measured `COMPUTE_S` before."""
    done, page_s, hit = Done(), SimulatedReader._page_s, SimulatedTiers.hit

    class Watched(SimulatedHost):
        def ran(self, flight: Flight) -> None:
            if self.queue.now_s > AGAIN_S:
                done.computed_tokens += flight.steps * sum(each.end - each.start for each in flight.step.chunks)
            super().ran(flight)

        def stored(self, blocks: Sequence[BlockHash]) -> None:
            done.chain += blocks if self.queue.now_s < OTHER_S else []
            super().stored(blocks)

    def came(tiers: SimulatedTiers, tier: Tier, block_hash: BlockHash) -> None:
        done.loaded.append(done.chain.index(block_hash))
        hit(tiers, tier, block_hash)

    def reading_s(reader: SimulatedReader) -> tuple[float, bool]:
        return (read_s, False) if reader._queue.now_s >= AGAIN_S else page_s(reader)

    patch.setattr("tools.simulate.fleet.worker.worker_lifecycle.SimulatedHost", Watched)
    patch.setattr(SimulatedTiers, "hit", came)
    patch.setattr(SimulatedReader, "_page_s", reading_s)
    patch.setattr(TierMetrics, "refused", lambda *_: done.not_loaded.append("refused"))
    patch.setattr(TierMetrics, "given_up", lambda *_: done.not_loaded.append("given up"))
    rows = [row(at_s, COUNT * BLOCK + 3, 4, chat) for at_s, chat in ((0.0, 0), (OTHER_S, 1), (AGAIN_S, 0))]
    run(trace(rows), dataclasses.replace(ALONE, decode_pages=COUNT + 2, tiers=TIERS), "round-robin")
    return done


def test_a_disk_as_fast_as_computing_brings_about_half(monkeypatch: pytest.MonkeyPatch) -> None:
    done = asked_again(monkeypatch)
    assert COUNT / 4 <= len(done.loaded) <= 3 * COUNT / 4
    assert done.computed_tokens <= (COUNT - len(done.loaded) + 2) * BLOCK
    assert done.not_loaded == []


def test_the_load_brings_the_last_blocks_the_last_one_first(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = asked_again(monkeypatch).loaded
    assert loaded[0] >= COUNT - 2
    assert loaded == list(range(loaded[0], loaded[-1] - 1, -1))


def test_computing_takes_over_from_a_disk_that_became_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        planned = len(asked_again(patch).loaded)
    done = asked_again(monkeypatch, 1.6 * COMPUTE_S)
    assert COUNT / 4 <= len(done.loaded) < planned
    assert done.computed_tokens >= (COUNT - len(done.loaded) - 2) * BLOCK
    assert done.not_loaded == []


def test_a_disk_that_became_slow_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    done = asked_again(monkeypatch, 2.5 * COMPUTE_S)
    assert 0 < len(done.loaded) < COUNT / 4
    assert done.not_loaded == ["given up"]


def test_a_disk_that_never_answers_leaves_all_to_computing(monkeypatch: pytest.MonkeyPatch) -> None:
    done = asked_again(monkeypatch, NEVER_S)
    assert done.loaded == []
    assert done.computed_tokens >= (COUNT - 2) * BLOCK
