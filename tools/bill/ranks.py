"""Workers of several ranks: what each of their processes takes, and what all of them take more than one rank would."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from tools.bill.model import BilledModel
from tools.bill.parts import BilledPart, size
from tools.tables import Grid, text_grid, text_row
from twostroke.config import Role
from twostroke.engine.backends.memory_plan import MemoryPlan

EVERY: Final = "every worker"


@dataclass(frozen=True, slots=True)
class RankedWorker:
    """A worker of several processes, or a worker of one process where others have several."""

    role: str
    plan: MemoryPlan
    more_bytes: int
    """What it holds besides pages more than a worker of one rank."""

    def as_json(self) -> dict[str, Any]:
        ranks = [
            {"weight_bytes": rank.weights.total, "working_bytes": rank.working_bytes} for rank in self.plan.processes
        ]
        return {"role": self.role, "ranks": ranks, "sums_bytes": self.plan.shared_bytes}


def ranks_part(model: BilledModel) -> BilledPart:
    workers = ranked(model)
    notes = (
        f"{len(worker.plan.processes)} ranks of {worker.role} take {size(worker.more_bytes)} more than one rank "
        "would: each is a process and has the whole embedding; pages are there once"
        for worker in workers
        if len(worker.plan.processes) > 1
    )
    return BilledPart(
        name="ranks",
        json=[worker.as_json() for worker in workers],
        tables=(("Ranks of a worker", _grid(workers)),) if workers else (),
        notes=tuple(notes),
        are_roles_unlike=len(workers) > 1,
    )


def ranked(model: BilledModel) -> tuple[RankedWorker, ...]:
    """Returns a worker of each role, or of every one, where some have several ranks."""
    if not model.flags.model.config.ranks_by_flag:
        return ()
    prefill, decode = (_ranked(model, role) for role in (Role.PREFILL, Role.DECODE))
    are_alike = len(prefill.plan.processes) == len(decode.plan.processes)
    return (RankedWorker(EVERY, decode.plan, decode.more_bytes),) if are_alike else (prefill, decode)


def _ranked(model: BilledModel, role: Role) -> RankedWorker:
    config = model.config(role)
    alone = config.replace(model=config.model.replace(tp=1, prefill_tp=None, decode_tp=None))
    plan, one = model.planned(config), model.planned(alone)
    more_bytes = plan.weights.total + plan.working_bytes - one.weights.total - one.working_bytes
    return RankedWorker(f"a {role.value} worker", plan, more_bytes)


def _grid(workers: Sequence[RankedWorker]) -> Grid:
    """Rows are the processes of a worker of each role."""
    rows = []
    for worker in workers:
        plan = worker.plan
        for number, rank in enumerate(plan.processes):
            parts = (rank.weights.total, rank.working_bytes, rank.total_bytes)
            rows.append(text_row((worker.role, f"{number}", *map(size, parts))))
        parts = (plan.weights.total, plan.working_bytes, plan.weights.total + plan.working_bytes)
        rows.append(text_row((worker.role, "all", *map(size, parts))))
    return text_grid(("worker", "rank", "weights", "working set", "together"), rows)
