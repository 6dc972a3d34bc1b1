"""The table of features that a worker's scheduler is given."""

from __future__ import annotations

from twostroke.config import SPECULATE_OFF, Role, WorkerConfig
from twostroke.kv_cache.form import page_form
from twostroke.kv_cache.pool import BlockPool
from twostroke.scheduler.branches import Extension, SchedulerBranches, SharedConstraint
from twostroke.scheduler.constraints.drafting import Drafting
from twostroke.scheduler.constraints.exact_blocks import ExactBlocks
from twostroke.scheduler.reading import ReadingRunner
from twostroke.scheduler.values import SchedulerLimits


def branches_of(
    config: WorkerConfig, pool: BlockPool, limits: SchedulerLimits, readings: ReadingRunner
) -> SchedulerBranches:
    """Returns the features of a worker's scheduler. `readings` runs the work of answers' readers."""
    return SchedulerBranches(_shared(config, pool, limits), _extension(config, limits), readings)


def _shared(config: WorkerConfig, pool: BlockPool, limits: SchedulerLimits) -> tuple[SharedConstraint, ...]:
    has_exact_blocks = not config.model.is_paced and page_form(config.kv_format).spans_block
    return (ExactBlocks(pool, limits.block_size),) if has_exact_blocks else ()


def _extension(config: WorkerConfig, limits: SchedulerLimits) -> Extension | None:
    """Returns what drafts tokens. Only decode workers make tokens, so only they draft some."""
    drafts = config.role is Role.DECODE and config.schedule.speculate != SPECULATE_OFF
    return Drafting(limits) if drafts else None
