"""How long a client may wait for its next token: part of the verdict on paced models. Pure.

What a real model has to compute again takes as long as its machine needs: that is told, and no miss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tests.trials.chaos.faults.outcome import Outcome
from tests.trials.chaos.injection.plan import Kind
from tools.simulate.fleet.results import percentile
from twostroke.config import PACED_PREFIX

SHARE = 0.99


@dataclass(frozen=True, slots=True)
class Bound:
    name: str
    kinds: frozenset[Kind]
    seconds: float
    """p99 over all faults of these kinds is less."""


BOUNDS = (
    Bound("killed", frozenset({Kind.KILL, Kind.KILL_RANK}), 3.0),
    Bound("frozen or cut off", frozenset({Kind.STOP, Kind.PARTITION, Kind.STOP_RANK}), 5.0),
)


def overruns(outcomes: Sequence[Outcome]) -> tuple[list[str], list[str]]:
    """Bounds that were missed, with the faults to blame; and faults over a bound that was kept all the same."""
    misses: list[str] = []
    notes: list[str] = []
    for bound in BOUNDS:
        waits = [
            (outcome.recovery_s, outcome.trial)
            for outcome in outcomes
            if outcome.trial.kind in bound.kinds and outcome.recovery_s is not None
        ]
        late = [(wait, trial) for wait, trial in waits if wait >= bound.seconds]
        named = ", ".join(f"{trial} {wait:.2f} s" for wait, trial in late)
        p99 = percentile([wait for wait, _ in waits], SHARE)
        if not late or p99 is None:
            continue
        if p99 >= bound.seconds:
            is_paced = outcomes[0].model.startswith(PACED_PREFIX)
            told = misses if is_paced else notes
            told.append(f"{bound.name}: p99 of recovery {p99:.2f} s is not under {bound.seconds:g} s: {named}")
        else:
            notes.append(f"{bound.name}: over {bound.seconds:g} s, within p99 of {p99:.2f} s: {named}")
    return misses, notes
