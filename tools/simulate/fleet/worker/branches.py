"""What features add to simulated workers: one line for each thing that the rest of the simulator asks for."""

from __future__ import annotations

from typing import Any

from tools.simulate.fleet.worker.drafts import cost_per_token, speculation_of
from twostroke.config import SPECULATE_OFF
from twostroke.scheduler.branches import SchedulerBranches
from twostroke.scheduler.constraints.drafting import Drafting
from twostroke.scheduler.values import SchedulerLimits

SCHEDULE: dict[str, Any] = {"speculate": SPECULATE_OFF}
"""Settings that all simulated workers have: their tokens are all alike."""
proposers_of = speculation_of
costs_of = cost_per_token


def scheduler_branches(limits: SchedulerLimits) -> SchedulerBranches:
    return SchedulerBranches(extension=Drafting(limits))
