"""A role mounted on a Ray node: the class that Ray sees, around the plain worker class that does the work.

The plain class is imported where the actor lives, so the supervisor, which only names these classes, never loads torch.
"""

from __future__ import annotations

import asyncio
import logging
import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import ray

from cluster.spec import NODE_ADDRESS
from twostroke import collector
from twostroke.config import Role, WorkerConfig
from twostroke.errors import InternalError, ServeError
from twostroke.models.catalog import locate
from twostroke.models.fetch import fetch
from twostroke.telemetry import configure_logging

if TYPE_CHECKING:  # loads torch
    from twostroke.worker.host import ReadyInfo

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Place:
    """Where an actor's process is."""

    pid: int
    node_id: str
    log_path: str


@dataclass(frozen=True, slots=True)
class Serving:
    """How a worker that serves is reached."""

    address: str
    epoch: str
    fingerprint: str
    metrics_address: str


class PlainWorker(Protocol):
    """What prefill and decode workers have in common."""

    async def run(self, incarnation: int) -> None: ...
    async def ready(self) -> ReadyInfo: ...
    async def shutdown(self) -> None: ...


class MountedWorker:
    """One worker process under Ray. A restart by Ray reruns `__init__` only; lives are begun by the supervisor."""

    def __init__(self, config: WorkerConfig) -> None:
        configure_logging(config.worker_id)
        if config.host == NODE_ADDRESS:
            config = replace(config, host=ray.util.get_node_ip_address())
        self._config = config
        self._worker = self._load(config)
        self._life: asyncio.Task[None] | None = None
        self._has_served = False

    def _load(self, config: WorkerConfig) -> PlainWorker:
        raise NotImplementedError

    async def place(self) -> Place:
        log_path = ray._private.worker.global_worker.get_err_file_path()
        return Place(os.getpid(), ray.get_runtime_context().get_node_id(), log_path or "")

    async def run(self, incarnation: int) -> None:
        """Serve until shutdown. A restarted supervisor calls it again and joins the life that is under way."""
        if self._life is None:
            self._life = asyncio.create_task(self._live(incarnation))
        try:
            await asyncio.shield(self._life)
        except Exception as error:
            log.exception("worker failed")
            raise _as_serve_error(error) from None

    async def _live(self, incarnation: int) -> None:
        model = self._config.model
        if not model.is_paced and locate(model.model, model.dtype) is None:
            # A node that has joined may lack what the launcher's machine has.
            await asyncio.to_thread(fetch, model.model, model.dtype, _log_progress)
        await self._worker.run(incarnation)

    async def ready(self) -> Serving:
        info = await self._worker.ready()
        self._has_served = True
        collector.keep_out_of_the_way()
        return Serving(info.address, info.epoch, info.fingerprint, info.metrics_address)

    async def shutdown(self) -> None:
        """Returns when what serves has tidied up: the supervisor kills the process next. A start is not waited for."""
        await self._worker.shutdown()
        if self._life is not None and self._has_served:
            await asyncio.wait((self._life,))


def _log_progress(label: str, fraction: float) -> None:
    if fraction in (0.0, 1.0):
        log.info("fetch step=%s done=%s", label, fraction == 1.0)


def _as_serve_error(error: BaseException) -> ServeError:
    """The supervisor must neither unpack groups nor need torch to unpickle what went wrong here."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error if isinstance(error, ServeError) else InternalError(f"{type(error).__name__}: {error}")


class PrefillWorker(MountedWorker):
    def _load(self, config: WorkerConfig) -> PlainWorker:
        from prefill_worker.worker import PrefillWorker as Plain

        return Plain(config)


class DecodeWorker(MountedWorker):
    def _load(self, config: WorkerConfig) -> PlainWorker:
        from decode_worker.worker import DecodeWorker as Plain

        return Plain(config)


MOUNTS: dict[Role, type[MountedWorker]] = {Role.PREFILL: PrefillWorker, Role.DECODE: DecodeWorker}
