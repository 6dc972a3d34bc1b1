"""The gain of speculation as `twostroke simulate` predicts it, from costs and counts of the worker that speculates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from decode_worker.speculations import POSITIONS
from router.fleet.worker import step_cost
from tests import metrics_page
from tools.simulate.fleet.shape import DraftShape, FleetShape
from tools.simulate.runs import Trial, run_trial
from tools.simulate.traces.formats import TraceRow
from tools.simulate.traces.trace import Trace
from twostroke.rpc.v1.control_pb2 import Load
from twostroke.scheduler.cost import StepCost

ANSWERS = 40
"""Answers that are simulated at least, in rounds of all prompts: draws of single ones differ."""
APART = 2.0
"""Simulated seconds between two rounds, over those that one takes with all of its steps: none overlap."""


@dataclass(frozen=True, slots=True)
class DraftCounts:
    """Drafted tokens of a decode worker by class of place, as its metrics count them, and those that were right."""

    drafted: tuple[float, ...] = (0.0,) * len(POSITIONS)
    kept: tuple[float, ...] = (0.0,) * len(POSITIONS)

    @classmethod
    def read(cls, metrics_address: str) -> DraftCounts:
        def by_class(name: str) -> tuple[float, ...]:
            full = f"twostroke_speculation_{name}_tokens_total"
            return tuple([metrics_page.total(metrics_address, full, position=str(place)) for place in POSITIONS])

        return cls(by_class("drafted"), by_class("kept"))

    def since(self, before: DraftCounts) -> DraftCounts:
        drafted = zip(self.drafted, before.drafted, strict=True)
        kept = zip(self.kept, before.kept, strict=True)
        return DraftCounts(tuple([now - then for now, then in drafted]), tuple([now - then for now, then in kept]))

    def shape(self, tokens: int) -> DraftShape:
        """Returns what was drafted in the steps that made so many tokens of streams known, in shares of these steps."""
        steps = tokens - sum(self.kept)
        return DraftShape(proposed=_by_place(self.drafted, steps), right=_by_place(self.kept, steps))


def _by_place(counts: Sequence[float], steps: float) -> tuple[float, ...]:
    """Returns the share of steps for each place, all places of a class alike."""
    shares: list[float] = []
    for last, count in zip(POSITIONS, counts, strict=True):
        places = last - len(shares)
        share = min(1.0 if not shares else shares[-1], count / places / steps)
        shares += [share] * places
    return tuple(shares)


@dataclass(frozen=True, slots=True)
class CalibratedFleet:
    """A prefill and a decode worker that cost what live ones reported."""

    prefill: Load
    decode: Sequence[Load]
    """Reports of the worker that drafts, after each round."""
    between_s: float
    """Seconds between two steps, in which no engine computes."""

    def shape(self) -> FleetShape:
        cost = _mean([step_cost(load) for load in self.decode])
        decode_cost = replace(cost, step_s=cost.step_s + self.between_s)
        prompts = step_cost(self.prefill)
        step_tokens, decode_step_tokens = self.prefill.costs.step_tokens, self.decode[-1].costs.step_tokens
        return FleetShape(
            prefill=1,
            decode=1,
            block_size=16,
            page_bytes=16,
            prefill_pages=self.prefill.pages_total,
            decode_pages=self.decode[-1].pages_total,
            cost=replace(
                prompts,
                step_s=decode_cost.step_s,
                stream_s=decode_cost.stream_s,
                context_token_s=decode_cost.context_token_s,
            ),
            decode_cost=decode_cost,
            step_tokens=step_tokens,
            decode_step_tokens=decode_step_tokens,
            max_num_seqs=min(64, step_tokens - 1, decode_step_tokens - 1),
            step_target_s=self.decode[-1].costs.step_target_s,
            local_prefill=True,
        )


def simulated_token_s(
    fleet: CalibratedFleet, drafts: DraftShape | None, prompts: Sequence[int], output_tokens: int
) -> float:
    """Returns the mean seconds per output token after the first, where prompts of these lengths come at once."""
    shape = replace(fleet.shape(), drafts=drafts)
    assert shape.decode_cost is not None
    longest_s = output_tokens * shape.decode_cost.of_streams(len(prompts), sum(prompts))
    rows, blocks = list[TraceRow](), 0
    for number in range(-(-ANSWERS // len(prompts))):
        for tokens in prompts:
            needed = -(-tokens // shape.block_size)
            named = tuple(range(blocks, blocks + needed))
            rows.append(TraceRow(number * (APART + 2 * longest_s), tokens, output_tokens, named))
            blocks += needed
    trace = Trace("speculation", shape.block_size, tuple(rows))
    run = run_trial(Trial(variant="kv", trace=trace, shape=shape))
    means = [outcome.itl_mean_s for outcome in run.outcomes if outcome.itl_mean_s is not None]
    return sum(means) / len(means)


def _mean(costs: Sequence[StepCost]) -> StepCost:
    return StepCost(
        **{term.name: sum([getattr(cost, term.name) for cost in costs]) / len(costs) for term in fields(StepCost)}
    )
