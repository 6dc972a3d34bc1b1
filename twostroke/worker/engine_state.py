"""The engine state is what a worker loads once and keeps over changes of its role: model, pages, cached blocks, costs.

An epoch of a worker is one role of it. A worker that may change its role (`WorkerConfig.flexible`) hands its engine
state to the next epoch: nothing is loaded again, and cached blocks stay valid.
"""

from __future__ import annotations

import asyncio
import sys
import time

from twostroke.base.errors import ConfigError, InternalError
from twostroke.base.ids import BlockHash, Epoch, PageId
from twostroke.config import WorkerConfig
from twostroke.engine.backends.built import BuiltEngine
from twostroke.engine.build import build_runner
from twostroke.engine.drafts.build import build_draft
from twostroke.engine.drafts.engine import DraftEngine
from twostroke.engine.loop import EngineThread
from twostroke.kv_cache.events import EventLog
from twostroke.kv_cache.memory import Pages
from twostroke.kv_cache.parts import GroupKind
from twostroke.kv_cache.pool import BlockPool
from twostroke.kv_cache.windows.window_group import window_group
from twostroke.models.catalog.places import locate
from twostroke.observability.profiler import Profiler
from twostroke.worker.measured.rates import Rates
from twostroke.worker.tiers.group_tiers import GroupTiers
from twostroke.worker.tiers.opening import open_tiers

SWITCH_INTERVAL_S = 0.0005
"""How long the event loop may hold the interpreter while the engine thread waits for it between two operators."""


class _EpochLog:
    """The event log of the current epoch."""

    def __init__(self) -> None:
        self.log = EventLog(Epoch.begin(0))


class _GroupListener:
    """Passes changes of the blocks of a group to the epoch's event log and the tiers, and new writers to the memory."""

    def __init__(self, group: GroupKind, epoch: _EpochLog, memory: Pages, tiers: GroupTiers) -> None:
        self._group = group
        self._epoch = epoch
        self._memory = memory
        self._own = tiers.groups[group]
        self._tiers = tiers

    def stored(self, name: BlockHash) -> None:
        self._epoch.log.stored(name, group=self._group)
        self._own.offload.saw(name)

    def removed(self, name: BlockHash) -> None:
        self._epoch.log.removed(name, group=self._group)

    def evicting(self, page: PageId, name: BlockHash, parent: BlockHash) -> None:
        self._own.offload.evicting(page, name, parent)

    def forgotten(self, name: BlockHash) -> None:
        for tiers in self._tiers.groups:
            tiers.forgotten(name)

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
        """The draft model, if any."""
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
        self._epoch = _EpochLog()
        listeners = [
            _GroupListener(GroupKind(index), self._epoch, built.memory, tiers) for index in range(len(tiers.groups))
        ]
        shape, (first, *others) = built.model.window_shape, listeners
        further = [] if shape is None else [window_group(shape, *others)]
        self.pool = BlockPool(built.model.pages, first, *further)

    @classmethod
    async def load(cls, config: WorkerConfig) -> EngineState:
        """Loads the model on a thread, because that takes seconds."""
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
        """Returns the event log of a new epoch; it begins with the cached blocks of all tiers, and without pins.

        Raises InternalError if the previous epoch still holds pages, because their writers are unknown then.
        """
        pool = self.pool
        held = sum(group.total - group.unheld for group in pool.groups)
        if held:
            raise InternalError(f"{held} pages are still held by the previous epoch: start a new process")
        pool.unpin_all()  # the supervisor gives an epoch its pins
        log = self._epoch.log = EventLog(epoch)
        for number, group in enumerate(pool.groups):
            for block_hash in group.unheld_blocks():
                log.stored(block_hash, group=GroupKind(number))
        self.tiers.begin_epoch(log)
        if log.has_changes:
            log.publish(time.time())
        return log

    async def close(self) -> None:
        """Closes engine and memory, unless the engine is lost: its step may still write until the process ends."""
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
