"""Page forms that store a block as a whole, as a branch of a worker."""

from __future__ import annotations

from twostroke.kv_cache.form import page_form
from twostroke.scheduler.branches import SharedConstraint
from twostroke.scheduler.constraints.exact_blocks import ExactBlocks
from twostroke.scheduler.values import SchedulerLimits
from twostroke.worker.branches import Branch, BranchHost
from twostroke.worker.engine_state import LoadedBranch


class PageForms(Branch):
    @classmethod
    def mount(cls, host: BranchHost, loaded: LoadedBranch | None) -> PageForms | None:
        config = host.config
        spans_block = not config.model.is_paced and page_form(config.kv_format).spans_block
        return cls(host) if spans_block else None

    def shared(self, limits: SchedulerLimits) -> tuple[SharedConstraint, ...]:
        return (ExactBlocks(self.host.pool, limits.block_size),)
