"""The engine state is what a worker loads once and keeps over changes of its role: model, pages, cached blocks, costs.

An epoch of a worker is one role of it. A worker that may change its role (`WorkerConfig.flexible`) hands its engine
state to the next epoch: nothing is loaded again, and cached blocks stay valid.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from twostroke.base.errors import ConfigError, InternalError
from twostroke.base.ids import BlockHash, Epoch, PageId
from twostroke.config import WorkerConfig
from twostroke.engine.backends.built import BuiltEngine
from twostroke.engine.backends.memory_plan import MemoryUse
from twostroke.engine.build import build_runner
from twostroke.engine.loop import EngineThread
from twostroke.kv_cache.events import EventLog
from twostroke.kv_cache.groups.group_pool import PoolListener
from twostroke.kv_cache.memory import Pages
from twostroke.kv_cache.parts import GroupKind
from twostroke.kv_cache.pool import BlockPool
from twostroke.kv_cache.windows.window_group import window_group
from twostroke.models.catalog.places import locate
from twostroke.observability.profiler import Profiler
from twostroke.scheduler.batch import Batch
from twostroke.scheduler.windows.places import places_of, with_windows
from twostroke.worker.measured.rates import Rates

SWITCH_INTERVAL_S = 0.0005
"""How long the event loop may hold the interpreter while the engine thread waits for it between two operators."""


class _EpochLog:
    """The event log of the current epoch."""

    def __init__(self) -> None:
        self.begin(EventLog(Epoch.begin(0)))

    def begin(self, log: EventLog) -> None:
        self.log = log
        self.blocks = [log.device_blocks(group) for group in GroupKind]
        """The blocks of each page group in the log."""


class LoadedBranch:
    """What a branch keeps until the process ends. A method does nothing unless a branch overrides it."""

    memory_use: tuple[MemoryUse, ...] = ()

    def listener(self, group: GroupKind) -> PoolListener | None:
        """Returns the listener to changes of the blocks of a page group, if any."""
        return None

    def begin_epoch(self, log: EventLog) -> None:
        """Announces what it holds in a new epoch's log."""

    async def close(self, engine: EngineThread | None) -> None:
        """Frees what it has. The engine runs no step; `engine` is None if it was never started."""


Loaders = Mapping[type, Callable[[WorkerConfig, BuiltEngine], LoadedBranch | None]]
"""Functions that load the branches of a table. Each is called on a thread and may raise ConfigError."""


class _GroupListener:
    """Passes changes of a group's blocks to the event log and to branches; begins a generation for each new writer."""

    def __init__(self, group: GroupKind, epoch: _EpochLog, memory: Pages, loaded: Iterable[LoadedBranch]) -> None:
        self._group = group
        self._epoch = epoch
        self._memory = memory
        self._others = [listener for each in loaded if (listener := each.listener(group)) is not None]

    def stored(self, block_hashes: Sequence[BlockHash]) -> None:
        self._epoch.blocks[self._group].add(block_hashes)
        for other in self._others:
            other.stored(block_hashes)

    def removed(self, block_hashes: Sequence[BlockHash]) -> None:
        self._epoch.blocks[self._group].remove(block_hashes)
        for other in self._others:
            other.removed(block_hashes)

    def evicting(self, page: PageId, block_hash: BlockHash, parent: BlockHash) -> None:
        for other in self._others:
            other.evicting(page, block_hash, parent)

    def forgotten(self, block_hash: BlockHash) -> None:
        for other in self._others:
            other.forgotten(block_hash)

    def new_writers(self, pages: Sequence[PageId]) -> None:
        self._memory.begin_new_generations(pages)


class EngineState:
    def __init__(self, built: BuiltEngine, profiler: Profiler, loaded: Mapping[type, LoadedBranch]) -> None:
        self.facts = built.model
        self.memory = built.memory
        self.determinism = built.determinism
        self.kernels = built.kernels
        self.loaded = loaded
        """What branches have loaded, by their classes."""
        self.memory_use = (*built.memory_use, *(use for each in loaded.values() for use in each.memory_use))
        self.expert_load = built.expert_load
        self.lost = built.lost
        self.engine = EngineThread(built.runner, profiler)
        self.neighbours = built.neighbours
        self.rates = Rates()
        self.is_calibrated = False
        self._epoch = _EpochLog()
        listeners = [
            _GroupListener(GroupKind(index), self._epoch, built.memory, loaded.values())
            for index in range(len(built.model.layout.regions))
        ]
        shape, (first, *others) = built.model.window_shape, listeners
        further = [] if shape is None else [window_group(shape, *others)]
        self.pool = BlockPool(built.model.pages, first, *further)
        self.places = places_of(self.pool)
        """Finds where steps read and write in further page groups."""

    @classmethod
    async def load(cls, config: WorkerConfig, loaders: Loaders) -> EngineState:
        """Loads the model, and what branches need, on threads, because that takes seconds."""
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        profiler = Profiler()
        built = await asyncio.to_thread(_build, config, profiler)
        loaded: dict[type, LoadedBranch] = {}
        try:
            for kind, load in loaders.items():
                branch = await asyncio.to_thread(load, config, built)
                if branch is not None:
                    loaded[kind] = branch
            return cls(built, profiler, loaded)
        except BaseException:
            for branch in loaded.values():
                await branch.close(None)
            await asyncio.to_thread(built.close)
            raise

    def placed(self, batch: Batch) -> Batch:
        """Returns a step that belongs to no sequence with its places in further page groups."""
        return with_windows(batch, self.facts.window_shape)

    def begin_epoch(self, epoch: Epoch) -> EventLog:
        """Returns the event log of a new epoch, which begins with all cached blocks.

        Raises InternalError if the previous epoch still holds pages, because their writers are unknown then.
        """
        pool = self.pool
        held = sum(group.total - group.unheld for group in pool.groups)
        if held:
            raise InternalError(f"{held} pages are still held by the previous epoch: start a new process")
        log = EventLog(epoch)
        self._epoch.begin(log)
        for number, group in enumerate(pool.groups):
            for block_hash in group.unheld_blocks():
                log.stored(block_hash, group=GroupKind(number))
        for each in self.loaded.values():
            each.begin_epoch(log)
        if log.has_changes:
            log.publish(time.time())
        return log

    async def close(self) -> None:
        """Closes engine and memory, unless the engine is lost: its step may still write until the process ends."""
        if self.engine.is_lost:
            return
        for each in self.loaded.values():
            await each.close(self.engine)
        await asyncio.to_thread(self.engine.close)
        self.memory.close()


def _build(config: WorkerConfig, profiler: Profiler) -> BuiltEngine:
    model = config.model
    if model.is_paced:
        return build_runner(config, None)
    directory = locate(model.model, model.dtype)
    if directory is None:
        raise ConfigError(f"model {model.model!r} is not on this machine; run: twostroke model pull {model.model}")
    return build_runner(config, directory, profiler)
