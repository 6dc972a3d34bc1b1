"""What a role uses of the worker that it is mounted on: a live worker and a simulated one offer the same."""

from __future__ import annotations

import asyncio
from typing import Protocol

from twostroke.config import WorkerConfig
from twostroke.engine.build import LoadedModel
from twostroke.engine.determinism import Determinism
from twostroke.ids import SessionId
from twostroke.kv_cache.pool import BlockPool
from twostroke.scheduler.cost import Budget
from twostroke.scheduler.scheduler import Scheduler
from twostroke.tracing.recorder import Recorder
from twostroke.worker.metrics import WorkerMetrics
from twostroke.worker.pulls.link_rates import LinkRates
from twostroke.worker.pulls.pull_spec import OpenPull, PullReport, PullSpec


class Loop(Protocol):
    """The work loop (`twostroke.worker.steps.work_loop`), as a role sees it."""

    @property
    def budget(self) -> Budget: ...
    @property
    def queued_s(self) -> float: ...
    @property
    def lends(self) -> bool:
        """Prompts that wait beside this worker are computed with its cores too."""

    def wake(self) -> None: ...


class Pulls(Protocol):
    """The pull client (`twostroke.worker.pulls.pull_client`), as a role sees it."""

    @property
    def links(self) -> LinkRates:
        """What was measured on the links from other workers."""

    def start(self, spec: PullSpec, tasks: asyncio.TaskGroup) -> asyncio.Future[PullReport]: ...
    def prune(self) -> None: ...
    def open_pulls(self) -> list[OpenPull]: ...
    def stop_one(self, pull: SessionId) -> None: ...


class StepNotice(Protocol):
    def notify(self) -> None: ...


class EventPublisher(Protocol):
    def publish(self) -> None: ...


def first_token_due_s(host: RoleHost) -> float | None:
    """Return when the first token of a request that has come now is due, if the cluster promises a time for that."""
    promised_s = host.config.slo_ttft_s
    return None if promised_s is None else asyncio.get_running_loop().time() + promised_s


class RoleHost(Protocol):
    @property
    def config(self) -> WorkerConfig: ...
    @property
    def facts(self) -> LoadedModel: ...
    @property
    def determinism(self) -> Determinism: ...
    @property
    def pool(self) -> BlockPool: ...
    @property
    def scheduler(self) -> Scheduler: ...
    @property
    def recorder(self) -> Recorder: ...
    @property
    def metrics(self) -> WorkerMetrics: ...
    @property
    def loop(self) -> Loop: ...
    @property
    def pulls(self) -> Pulls: ...
    @property
    def progress(self) -> StepNotice: ...
    @property
    def feed(self) -> EventPublisher: ...
    def new_session(self) -> SessionId: ...
