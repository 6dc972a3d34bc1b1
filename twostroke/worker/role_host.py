"""The interface of a worker to the role that is mounted on it. Live and simulated workers have the same interface."""

from __future__ import annotations

import asyncio
from typing import Protocol

from twostroke.base.errors import EngineLost
from twostroke.base.ids import SessionId
from twostroke.engine.backends.facts import LoadedModel
from twostroke.engine.determinism import Determinism
from twostroke.scheduler.batching import Step
from twostroke.scheduler.cost import Budget
from twostroke.scheduler.sequence import Sequence
from twostroke.scheduler.values import AdmittedSequence, Emission
from twostroke.tracing.recorder import Recorder
from twostroke.worker.metrics import WorkerMetrics
from twostroke.worker.supply.open_pull import OpenPull
from twostroke.worker.supply.remote import PullStarter, SupplyHost


class Loop(Protocol):
    """The work loop (`twostroke.worker.steps.work_loop`), as a role sees it."""

    @property
    def budget(self) -> Budget: ...
    @property
    def queued_s(self) -> float: ...
    @property
    def lends(self) -> bool:
        """Whether other workers use this worker's cores for prompts that wait there."""

    def wake(self) -> None:
        """Lets the work loop look for work at once."""


class Pulls(PullStarter, Protocol):
    """The pull client (`twostroke.worker.pulls.pull_client`), as a role sees it."""

    def prune(self) -> None: ...
    def open_pulls(self) -> list[OpenPull]:
        """Returns the pulls of which something has not come, in the order of their start."""

    def stop_one(self, pull: SessionId) -> None: ...


class StepNotice(Protocol):
    def notify(self) -> None:
        """Wakes all that wait for a change of this worker's sequences or pages."""


class EventPublisher(Protocol):
    def publish(self) -> None: ...


def first_token_due_s(host: RoleHost) -> float | None:
    """Returns when the first token of a request that arrives now is due, if the cluster promises a time."""
    promised_s = host.config.slo_ttft_s
    return None if promised_s is None else asyncio.get_running_loop().time() + promised_s


class RoleHandlers(Protocol):
    """The role's handlers for events of the scheduler."""

    def admitted(self, admission: AdmittedSequence) -> None:
        """Called with a sequence that got its pages, before any of its missing blocks is computed."""

    def planning(self) -> None:
        """Called before each step is chosen: the moment to change what is computed here."""

    def preempted(self, sequence: Sequence) -> None: ...

    def computed(self, step: Step, seconds: float) -> None:
        """Called after a step that computed prompt tokens."""

    def emitted(self, emissions: list[Emission]) -> None: ...

    def failed(self, sequences: list[Sequence], error: Exception) -> None:
        """Called with sequences that were ended because they fail by themselves."""

    def lost(self, error: EngineLost) -> None:
        """Called when the engine is lost, and with it all open work."""


class RoleHost(SupplyHost, Protocol):
    @property
    def facts(self) -> LoadedModel: ...
    @property
    def determinism(self) -> Determinism: ...
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
