"""The draft model as a branch of a worker."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from twostroke.config import Role, WorkerConfig
from twostroke.engine.backends.built import BuiltEngine
from twostroke.engine.drafts.build import build_draft
from twostroke.engine.drafts.engine import DraftEngine
from twostroke.engine.loop import EngineThread
from twostroke.kv_cache.groups.page_state import PageState
from twostroke.observability.telemetry import family_of
from twostroke.scheduler.scheduler import Scheduler
from twostroke.scheduler.values import SchedulerLimits
from twostroke.worker.branches import Branch, BranchHost, SecondModel
from twostroke.worker.drafts.model_drafts import DraftThread, ModelDrafts
from twostroke.worker.engine_state import LoadedBranch
from twostroke.worker.measured.rates import Rates


class LoadedDraft(LoadedBranch):
    def __init__(self, draft: DraftEngine) -> None:
        self.draft = draft
        self.rates = Rates()
        self.memory_use = draft.memory_use

    async def close(self, engine: EngineThread | None) -> None:
        if engine is None:
            await asyncio.to_thread(self.draft.close)
        else:
            await engine.between_steps(self.draft.close)


class DraftModel(Branch):
    @staticmethod
    def load(config: WorkerConfig, built: BuiltEngine) -> LoadedDraft | None:
        draft = build_draft(config, built)
        return None if draft is None else LoadedDraft(draft)

    @classmethod
    def mount(cls, host: BranchHost, loaded: LoadedBranch | None) -> DraftModel | None:
        return cls(host, loaded) if isinstance(loaded, LoadedDraft) else None

    def __init__(self, host: BranchHost, loaded: LoadedDraft) -> None:
        super().__init__(host)
        self._loaded = loaded
        steps = DraftThread(host.engine, loaded.draft)
        self.second_models = [
            SecondModel("draft model", steps, loaded.rates, loaded.draft.max_model_len, loaded.draft.pages)
        ]

    def between_steps(self, scheduler: Scheduler, limits: SchedulerLimits) -> ModelDrafts | None:
        """Returns the drafting before steps; None on prefill workers, which sample no tokens."""
        host, draft = self.host, self._loaded.draft
        if host.config.role is not Role.DECODE:
            return None
        rates = host.engine_state.rates, self._loaded.rates
        drafts = ModelDrafts(draft, host.engine, scheduler, limits, *rates, lambda: host.loop.lends)
        host.metrics.registry.register(_Pages(host.config.role.value, draft.pages, drafts))
        return drafts


class _Pages(Collector):
    """Reports at every scrape how many pages of the draft model are in use."""

    def __init__(self, role: str, pages: int, drafts: ModelDrafts) -> None:
        self._role = role
        self._pages = pages
        self._drafts = drafts

    def collect(self) -> Iterable[GaugeMetricFamily]:
        free = self._drafts.free_pages
        counts = {PageState.FREE.value: free, PageState.ACTIVE.value: self._pages - free}
        yield family_of(GaugeMetricFamily, self._role, "draft_pages", "Pages of the draft model by state.", counts)
