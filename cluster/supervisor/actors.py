"""The class that Ray runs on a node, around the plain worker class that does the work.

The plain class is imported where the actor runs. The supervisor only names these classes, so it never loads torch.
"""

from __future__ import annotations

import asyncio
import logging
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import ray

from cluster.branches import FURTHER_MODELS
from cluster.values.desired_state import Checkpoint
from cluster.values.spec import NODE_ADDRESS
from twostroke.base import allocator
from twostroke.base.errors import EngineLost, InternalError, ServeError
from twostroke.config import Role, WorkerConfig
from twostroke.kv_cache.tiers.folders import SegmentFolder, hold_own
from twostroke.models.catalog.fetch import fetch
from twostroke.models.catalog.places import cache_dir, locate
from twostroke.observability.telemetry import configure_logging

if TYPE_CHECKING:  # loads torch
    from twostroke.worker.engine_state import EngineState
    from twostroke.worker.host import ReadyInfo

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ActorLocation:
    """The process of an actor, and its node."""

    pid: int
    node_id: str
    log_path: str
    is_idle: bool = False
    """Whether no epoch runs in the process."""

    def is_same_process(self, other: ActorLocation | None) -> bool:
        return other is not None and (self.pid, self.node_id) == (other.pid, other.node_id)


@dataclass(frozen=True, slots=True)
class Serving:
    """The addresses and the epoch of a worker that serves."""

    address: str
    epoch: str
    fingerprint: str
    metrics_address: str
    role: Role
    """Role of this epoch."""
    advice: str = ""
    """Advice for the operator; empty where there is none."""
    pool_bytes: int = 0
    pool_tokens: int = 0
    """What its page pool takes, and how many tokens fit into it."""
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    """The weights of this epoch, as `run` was told."""


class PlainWorker(Protocol):
    """The common interface of prefill and decode workers. One object serves one epoch."""

    @property
    def engine_state(self) -> EngineState | None:
        """What the worker has loaded, for the next epoch in this process."""

    async def run(self, incarnation: int) -> None: ...
    async def ready(self) -> ReadyInfo: ...
    async def shutdown(self) -> None: ...


class MountedWorker:
    """One worker process under Ray. A restart by Ray reruns `__init__` only; the supervisor then calls `run`.

    A flexible worker serves one epoch after the other in its process, each in one role. Other workers serve one.
    """

    def __init__(self, config: WorkerConfig) -> None:
        configure_logging(config.worker_id, owns_files=True)
        if config.host == NODE_ADDRESS:
            config = config.replace(host=ray.util.get_node_ip_address())
        self._base = config
        self._config = config
        """Configuration of the epoch: its role and its model may be others than the process was created for."""
        self._worker = self._load(config, None)
        self._checkpoint = Checkpoint()
        self._epoch_task: asyncio.Task[None] | None = None
        self._has_served = False
        self._heard = 0
        """The highest incarnation that `run` was called with."""
        self._held_pages: list[SegmentFolder] = []
        """Folders of pages that nobody may adopt while the worker is asleep."""
        self._called = asyncio.Event()

    def _load(self, config: WorkerConfig, engine_state: EngineState | None) -> PlainWorker:
        """Creates the plain worker. Its class is imported here, where the actor runs."""
        if config.role is Role.PREFILL:
            from prefill_worker.worker import PrefillWorker as Prefill

            return Prefill(config, engine_state)
        from decode_worker.worker import DecodeWorker as Decode

        return Decode(config, engine_state)

    async def place(self) -> ActorLocation:
        log_path = ray._private.worker.global_worker.get_err_file_path()
        is_idle = self._epoch_task is None or self._epoch_task.done()
        return ActorLocation(os.getpid(), ray.get_runtime_context().get_node_id(), log_path or "", is_idle)

    async def run(self, incarnation: int, role: Role, checkpoint: Checkpoint) -> None:
        """Serves these weights until shutdown. A restarted supervisor joins the epoch that is running, in any role."""
        if self._epoch_task is None or (
            self._config.flexible and self._epoch_task.done() and not self._epoch_task.exception()
        ):
            self._begin(incarnation, role, checkpoint)
        assert self._epoch_task is not None
        self._heard = max(self._heard, incarnation)
        self._called.set()
        self._called = asyncio.Event()
        try:
            await asyncio.shield(self._epoch_task)
        except EngineLost as error:
            raise error from None  # the worker has logged it, where its epoch ended
        except Exception as error:
            log.exception("worker failed")
            raise _as_serve_error(error) from None

    async def _hold_pages(self) -> None:
        cache = self._config.cache
        if cache.disk_cache_bytes > 0 and not self._held_pages:
            root = Path(cache.disk_cache_dir or cache_dir() / "pages")
            self._held_pages = await asyncio.to_thread(hold_own, root, self._config.worker_id)

    def _begin(self, incarnation: int, role: Role, checkpoint: Checkpoint) -> None:
        for folder in self._held_pages:
            folder.close()
        self._held_pages = []
        config, replaced = config_for(self._base, role, checkpoint.model), None
        if self._epoch_task is not None or config != self._config:
            state = self._worker.engine_state
            if checkpoint != self._checkpoint:
                state, replaced = None, state
            self._worker, self._config = self._load(config, state), config
        self._checkpoint, self._has_served = checkpoint, False
        self._epoch_task = asyncio.create_task(self._serve_epoch(self._worker, incarnation, replaced))

    async def _serve_epoch(self, worker: PlainWorker, incarnation: int, replaced: EngineState | None) -> None:
        """Runs one epoch. First it closes `replaced`: the previous epoch's weights, where this epoch has others."""
        if replaced is not None:
            await replaced.close()
        for name in _models(self._config):
            if locate(name, self._config.model.dtype) is None:
                # A node that was joined may lack the files that the launcher's machine has.
                await asyncio.to_thread(fetch, name, self._config.model.dtype, _log_progress)
        await worker.run(incarnation)

    async def ready(self, incarnation: int) -> Serving:
        """Waits until the epoch of this incarnation serves. It may be called before `run`: Ray keeps no order."""
        while self._heard < incarnation:
            await self._called.wait()
        info = await self._worker.ready()
        self._has_served = True
        allocator.freeze_loaded_objects()
        return Serving(
            info.address,
            info.epoch,
            info.fingerprint,
            info.metrics_address,
            self._config.role,
            info.advice,
            info.pool_bytes,
            info.pool_tokens,
            self._checkpoint,
        )

    async def shutdown(self) -> None:
        """Returns when a serving worker has cleaned up; the supervisor then kills the process or begins the next epoch.

        A worker that still starts is not waited for.
        """
        await self._worker.shutdown()
        if self._epoch_task is not None and self._has_served:
            await asyncio.wait((self._epoch_task,))

    async def release(self) -> None:
        """Frees model and pages that an epoch has left, so that the process takes little while the worker is asleep.

        Its pages on disk are held for it until it wakes.
        """
        if self._epoch_task is None or self._epoch_task.done():
            await self._hold_pages()
        if self._epoch_task is None or not self._epoch_task.done():
            return
        state, self._epoch_task = self._worker.engine_state, None
        self._worker = self._load(self._config, None)
        if state is not None and self._config.flexible:  # otherwise the epoch has closed it
            await state.close()
        del state
        allocator.release_unused_memory()


def config_for(config: WorkerConfig, role: Role, model: str) -> WorkerConfig:
    """Returns the configuration of an epoch in this role, with the weights of this model under the same public name."""
    settings = config.model
    if model not in ("", settings.model):
        settings = settings.replace(model=model, served_model_name=settings.public_name)
    return config.replace(role=role, model=settings)


def _log_progress(label: str, fraction: float) -> None:
    if fraction in (0.0, 1.0):
        log.info("fetch step=%s done=%s", label, fraction == 1.0)


def _as_serve_error(error: BaseException) -> ServeError:
    """Converts an error, so that the supervisor neither unpacks groups nor needs torch to unpickle it."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error if isinstance(error, ServeError) else InternalError(f"{type(error).__name__}: {error}")


class PrefillActor(MountedWorker):
    """The actor of a prefill worker; a flexible worker's process keeps this name in the other role."""


class DecodeActor(MountedWorker):
    """The actor of a decode worker."""


MOUNTS: dict[Role, type[MountedWorker]] = {Role.PREFILL: PrefillActor, Role.DECODE: DecodeActor}


def _models(config: WorkerConfig) -> list[str]:
    """Returns the names of the models that a worker loads."""
    own = [] if config.model.is_paced else [config.model.model]
    return [*own, *(name for further in FURTHER_MODELS for name in further.loaded_by(config))]
