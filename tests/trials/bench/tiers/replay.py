"""The requests of a run in the simulator, with a fleet that was fitted to what the run's log says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tools.simulate.fit.core_fit import ProfiledStep
from tools.simulate.fit.fitting import fitted, read_log
from tools.simulate.fit.likeness import Likeness, likeness
from tools.simulate.runs import Trial, run_trial
from tools.simulate.traces.trace import Replay, read_trace
from tools.simulate.traces.trace import replayed as in_order
from twostroke.config import CacheConfig


def replayed(variant: str, request_log: Path, cache: CacheConfig, steps: Sequence[list[ProfiledStep]]) -> Likeness:
    """Simulates a run on workers with the same tiers; times are from the decision to the first token.

    With `steps` of its workers, simulated ones share the host's cores.
    """
    log = read_log(request_log)
    shape = fitted(log, steps=steps)
    tiers = replace(
        shape.tiers,
        host_bytes=cache.host_cache_bytes,
        disk_bytes=cache.disk_cache_bytes,
        disk_write_bytes_per_s=1e6 * cache.disk_write_mb_s,
    )
    trace = in_order(read_trace(request_log), Replay())
    run = run_trial(Trial(variant="kv", trace=trace, shape=replace(shape, tiers=tiers), holds=True))
    return replace(likeness(log.answers, run), policy=variant)
