"""The engine state is what a worker loads once and keeps over changes of its role: model, pages, cached blocks, costs.

An epoch of a worker is one role of it. A worker that may change its role (`WorkerConfig.flexible`) hands its engine
state to the next epoch: nothing is loaded again, and cached blocks stay valid.
"""

from __future__ import annotations

import asyncio
import sys
import time

from twostroke.config import WorkerConfig
from twostroke.engine.build import BuiltEngine, build_runner
from twostroke.engine.draft_build import build_draft
from twostroke.engine.draft_engine import DraftEngine
from twostroke.engine.loop import EngineThread
from twostroke.errors import ConfigError, InternalError
from twostroke.ids import BlockHash, Epoch, PageId
from twostroke.kv_cache.events import EventLog
from twostroke.kv_cache.memory import Pages
from twostroke.kv_cache.pool import BlockPool
from twostroke.kv_cache.tier import Group
from twostroke.models.catalog.places import locate
from twostroke.profiler import Profiler
from twostroke.worker.steps.rates import Rates
from twostroke.worker.tiers.group_tiers import GroupTiers
from twostroke.worker.tiers.opening import open_tiers
from twostroke.worker.tiers.page_tiers import PageTiers

SWITCH_INTERVAL_S = 0.0005
"""How long the event loop may hold the interpreter while the engine thread waits for it between two operators."""


class _PoolListener:
    """Passes changes of blocks to the event log of the current epoch and the tiers, and new writers to the memory."""

    def __init__(self, memory: Pages, tiers: GroupTiers) -> None:
        self.log = EventLog(Epoch.begin(0))
        self._memory = memory
        self._tiers = tiers

    def stored(self, name: BlockHash) -> None:
        self.log.stored(name)
        self._tiers.full.saw(name)

    def removed(self, name: BlockHash) -> None:
        self.log.removed(name)

    def evicting(self, page: PageId, name: BlockHash, parent: BlockHash) -> None:
        self._tiers.full.evicting(page, name, parent)

    def forgotten(self, name: BlockHash) -> None:
        for tiers in self._tiers.groups:
            tiers.forgotten(name)

    def new_writer(self, page: PageId) -> None:
        self._memory.begin_new_generation(page)


class _WindowListener:
    """Passes changes of window parts to the epoch's event log and the tiers, and new writers to the memory."""

    def __init__(self, pages: _PoolListener, memory: Pages, tiers: PageTiers) -> None:
        self._pages = pages
        self._memory = memory
        self._tiers = tiers

    def stored(self, block_hash: BlockHash) -> None:
        self._pages.log.stored(block_hash, group=Group.WINDOW)
        self._tiers.saw(block_hash)

    def removed(self, block_hash: BlockHash) -> None:
        self._pages.log.removed(block_hash, group=Group.WINDOW)

    def evicting(self, slot: PageId, block_hash: BlockHash, parent: BlockHash) -> None:
        self._tiers.evicting(slot, block_hash, parent)

    def new_writer(self, page: PageId) -> None:
        self._memory.begin_new_generation(page)


class EngineState:
    def __init__(
        self, built: BuiltEngine, profiler: Profiler, tiers: GroupTiers, draft: DraftEngine | None = None
    ) -> None:
        self.facts = built.model
        self.memory = built.memory
        self.determinism = built.determinism
        self.kernels = built.kernels
        self.draft = draft
        """The draft model beside the model, if any."""
        self.draft_rates = Rates()
        self.memory_use = (*built.memory_use, *(() if draft is None else draft.memory_use))
        self.expert_load = built.expert_load
        self.lost = built.lost
        self.engine = EngineThread(built.runner, profiler)
        self.neighbours = built.neighbours
        self.adapters = built.adapters
        self.rates = Rates()
        self.is_calibrated = False
        self.tiers = tiers
        self._listener = _PoolListener(built.memory, tiers)
        windows = tiers.windows
        window_listener = None if windows is None else _WindowListener(self._listener, built.memory, windows)
        self.pool = BlockPool(built.model.pages, self._listener, built.model.window_shape, window_listener)

    @classmethod
    async def load(cls, config: WorkerConfig) -> EngineState:
        """Load the model on a thread, because that takes seconds."""
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        profiler = Profiler()
        built = await asyncio.to_thread(_build, config, profiler)
        draft: DraftEngine | None = None
        try:
            draft = await asyncio.to_thread(build_draft, config, built)
            tiers = await asyncio.to_thread(open_tiers, config, built.model, built.memory)
        except BaseException:
            if draft is not None:
                await asyncio.to_thread(draft.close)
            await asyncio.to_thread(built.close)
            raise
        return cls(built, profiler, tiers, draft)

    def begin_epoch(self, epoch: Epoch) -> EventLog:
        """Return the event log of a new epoch; it begins with the cached blocks of all tiers, and without pins.

        Raises InternalError if the previous epoch still holds pages, because their writers are unknown then.
        """
        pool = self.pool
        if pool.unheld != pool.total:
            raise InternalError(
                f"{pool.total - pool.unheld} pages are still held by the previous epoch: start a new process"
            )
        windows = pool.windows
        if windows is not None and windows.unheld != windows.shape.slots:
            raise InternalError("window parts are still held by the previous epoch: start a new process")
        pool.unpin_all()  # the supervisor gives an epoch its pins
        log = self._listener.log = EventLog(epoch)
        for block in pool.cached():
            log.stored(block.hash)
        for block_hash in () if windows is None else windows.cached():
            log.stored(block_hash, group=Group.WINDOW)
        self.tiers.begin_epoch(log)
        if log.has_changes:
            log.publish(time.time())
        return log

    async def close(self) -> None:
        """Close engine and memory, unless the engine is lost: its step may still write until the process ends."""
        if self.engine.is_lost:
            return
        if self.draft is not None:
            await self.engine.between_steps(self.draft.close)
        await asyncio.to_thread(self.engine.close)
        await self.tiers.close()
        self.memory.close()


def _build(config: WorkerConfig, profiler: Profiler) -> BuiltEngine:
    model = config.model
    if model.is_paced:
        return build_runner(config, None)
    directory = locate(model.model, model.dtype)
    if directory is None:
        raise ConfigError(f"model {model.model!r} is not on this machine; run: twostroke model pull {model.model}")
    return build_runner(config, directory, profiler)
