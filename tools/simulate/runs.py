"""Simulated runs, several at a time in processes of their own: what goes in and comes out is plain values."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import multiprocessing
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

from tools.simulate.fleet.results import SimulatedRun
from tools.simulate.fleet.routing.simulated_routing import RoutingSetup
from tools.simulate.fleet.shape import FleetShape
from tools.simulate.fleet.simulation import simulate
from tools.simulate.fleet.worker.host import FastParts
from tools.simulate.fleet.worker.steps import StepLengths
from tools.simulate.traces.trace import Trace
from tools.simulate.variants import policy_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One policy, one fleet, one trace at one pace."""

    variant: str
    trace: Trace
    shape: FleetShape
    rate_scale: float = 1.0
    peer_pulls: bool = True
    holds: bool = False
    """Whether requests wait in routers for their turn, as live ones let them, and not at their workers."""
    lengths: StepLengths | None = None
    """The lengths of steps, where the shape's costs do not say them."""


COLLECT_AT = 200_000
"""Objects allocated before the garbage collector looks. A fleet is millions of them that stay for the whole run. To
look through them after every 700 takes a fifth of its time."""
COLLECTIONS = 100
"""Collections of young objects before older ones are looked through. Nearly all that survives one stays for the run."""

Runner = Callable[[Sequence[Trial]], list[SimulatedRun]]
"""Runs trials, and returns their results in the same order."""


@contextlib.contextmanager
def runner(jobs: int) -> Iterator[Runner]:
    """Yields a function that runs trials, `jobs` at a time.

    It prints on standard error which have ended, as some take minutes.

    Its processes begin when they are first needed, and stay for later trials: to begin one takes a second or two.
    """
    # Spawned: a forked child would inherit whatever threads the caller has, in whatever state.
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:

        def run_all(trials: Sequence[Trial]) -> list[SimulatedRun]:
            if jobs == 1 or len(trials) < 2:
                return _told(trials, map(run_trial, trials))
            return _told(trials, pool.map(run_trial, trials))

        yield run_all


def _told(trials: Sequence[Trial], runs: Iterable[SimulatedRun]) -> list[SimulatedRun]:
    done = []
    for number, (trial, run) in enumerate(zip(trials, runs, strict=True), start=1):
        done.append(run)
        if sys.stderr.isatty():
            shape = trial.shape
            what = f"{trial.variant} x{trial.rate_scale:.3g} on {shape.prefill}+{shape.decode}"
            print(f"{number}/{len(trials)} {what}: {run.cpu_s:.1f} s", file=sys.stderr)
    return done


def run_trial(trial: Trial) -> SimulatedRun:
    setup = RoutingSetup(
        trial.variant, lambda: policy_of(trial.variant, peer_pulls=trial.peer_pulls), holds=trial.holds
    )
    with _collecting_rarely():
        parts = None if trial.lengths is None else FastParts(trial.lengths)
        return simulate(paced(trial.trace, trial.rate_scale), trial.shape, setup, parts=parts)


@contextlib.contextmanager
def _collecting_rarely() -> Iterator[None]:
    usual = gc.get_threshold()
    gc.set_threshold(COLLECT_AT, COLLECTIONS, COLLECTIONS)
    try:
        yield
    finally:
        gc.set_threshold(*usual)


def paced(trace: Trace, rate_scale: float) -> Trace:
    if rate_scale == 1.0:
        return trace
    rows = (dataclasses.replace(row, timestamp_s=row.timestamp_s / rate_scale) for row in trace.rows)
    return dataclasses.replace(trace, rows=tuple(rows))


def span_s(trace: Trace) -> float:
    """Returns the seconds from the first arrival to the last."""
    return trace.rows[-1].timestamp_s - trace.rows[0].timestamp_s
