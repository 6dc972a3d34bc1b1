"""What a worker loads once and keeps over its roles: the model on its thread, its pages and what they hold, its costs.

A life of a worker is one role of it. Where a worker may become the other one (`WorkerConfig.flexible`), the plant goes
from life to life: nothing is loaded again, and what is cached stays valid, under the epoch of the new life.
"""

from __future__ import annotations

import asyncio
import sys
import time

from twostroke.config import WorkerConfig
from twostroke.engine.build import BuiltEngine, build_runner
from twostroke.engine.loop import EngineThread
from twostroke.errors import ConfigError, InternalError
from twostroke.ids import BlockName, Epoch, PageId
from twostroke.kv_cache.events import EventLog
from twostroke.kv_cache.memory import Pages
from twostroke.kv_cache.pool import BlockPool, PageState
from twostroke.models.catalog import locate
from twostroke.worker.rates import Rates

SWITCH_INTERVAL_S = 0.0005
"""How long the event loop may hold the interpreter while the engine thread waits for it between two operators."""


class _PoolListener:
    """Tells the event log of the current life of blocks, and the memory of new writers."""

    def __init__(self, memory: Pages) -> None:
        self.log = EventLog(Epoch.begin(0))
        self._memory = memory

    def stored(self, name: BlockName) -> None:
        self.log.stored(name)

    def removed(self, name: BlockName) -> None:
        self.log.removed(name)

    def new_writer(self, page: PageId) -> None:
        self._memory.begin_new_generation(page)


class Plant:
    def __init__(self, built: BuiltEngine) -> None:
        self.facts = built.model
        self.memory = built.memory
        self.determinism = built.determinism
        self.engine = EngineThread(built.runner)
        self.rates = Rates()
        self.is_calibrated = False
        self._listener = _PoolListener(built.memory)
        self.pool = BlockPool(built.model.pages, self._listener)

    @classmethod
    async def load(cls, config: WorkerConfig) -> Plant:
        """On a thread: it takes seconds."""
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        return cls(await asyncio.to_thread(_build, config))

    def begin_life(self, epoch: Epoch) -> EventLog:
        """The log of a life: it begins with what is cached here.

        Raises InternalError where something of the life before still holds a page: then nobody knows who writes there.
        """
        pool = self.pool
        unheld = pool.count(PageState.FREE) + pool.count(PageState.CACHED)
        if unheld != pool.total:
            raise InternalError(f"{pool.total - unheld} pages are still held by the life before: begin a new process")
        log = self._listener.log = EventLog(epoch)
        for block in pool.cached():
            log.stored(block.name)
        if log.has_news:
            log.publish(time.time())
        return log

    async def close(self) -> None:
        """Of a lost engine, whose step may still be reading and writing, the end of the process is the end."""
        if self.engine.is_lost:
            return
        await asyncio.to_thread(self.engine.close)
        self.memory.close()


def _build(config: WorkerConfig) -> BuiltEngine:
    model = config.model
    if model.is_paced:
        return build_runner(config, None)
    directory = locate(model.model, model.dtype)
    if directory is None:
        raise ConfigError(f"model {model.model!r} is not on this machine; run: twostroke model pull {model.model}")
    return build_runner(config, directory)
