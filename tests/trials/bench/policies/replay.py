"""The simulator on the rows that real clusters were asked, with a fleet fitted to what those wrote of themselves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import median

from tests.trials.bench.policies.options import Served
from tests.trials.bench.policies.trial import Trial
from tools.simulate.fit.fitting import fitted
from tools.simulate.fit.likeness import SHARES, Likeness
from tools.simulate.fleet import results
from tools.simulate.fleet.results import SimulatedRun, percentile
from tools.simulate.fleet.shape import FleetShape
from tools.simulate.runs import Runner
from tools.simulate.runs import Trial as Simulated
from tools.simulate.traces.trace import Trace

NO_LOCAL_PREFILL = "--no-local-prefill"


def fleet_of(trials: Sequence[Trial], served: Served) -> FleetShape:
    """One for all policies: the simulator is told of none of them how it did."""
    shape = fitted(*(trial.log for trial in trials))
    return replace(shape, seed=served.seed, local_prefill=shape.local_prefill and NO_LOCAL_PREFILL not in served.flags)


def replayed(policies: Sequence[str], trace: Trace, shape: FleetShape, run_all: Runner) -> list[SimulatedRun]:
    """Requests wait in routers as they do in live ones."""
    return run_all([Simulated(variant=policy, trace=trace, shape=shape, holds=True) for policy in policies])


def likeness(trials: Sequence[Trial], run: SimulatedRun) -> Likeness:
    """Times to first token of all rounds of one policy at one pace, as clients saw them."""
    own = [trial.report.ttft_s for trial in trials if trial.policy == run.policy]
    known = [found for found in own if found is not None]
    simulated = results.ttfts(run)
    return Likeness(
        policy=run.policy,
        requests=sum(found.count for found in known),
        real_s=(_median(found.p50 for found in known), _median(found.p90 for found in known)),
        simulated_s=tuple(percentile(simulated, share) for share in SHARES),
    )


def _median(values: Iterable[float]) -> float | None:
    listed = list(values)
    return median(listed) if listed else None


def ranking(policies: Sequence[str], values: Sequence[float | None]) -> str:
    """The quickest first."""
    known = sorted((value, policy) for policy, value in zip(policies, values, strict=True) if value is not None)
    return " < ".join(policy for _, policy in known)
