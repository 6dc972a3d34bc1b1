"""The live work loop in virtual time, one step after the other, with a device that only takes time.

It is slower than `SimulatedLoop`, which runs many equal steps at once, but shares time as live workers do.
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, Protocol

from tools.simulate.fleet.worker.interfaces import SimulatedWorkerView
from tools.simulate.fleet.worker.steps import Flight, StepWatch
from twostroke.observability.profiler import Profiler
from twostroke.scheduler.batch import Batch, StepResult
from twostroke.scheduler.batching import Step
from twostroke.scheduler.cost import Budget, StepCost, StepTerms
from twostroke.scheduler.sequence import Sequence as KnownSequence
from twostroke.scheduler.values import AdmittedSequence, Emission
from twostroke.worker.measured.rates import Rates
from twostroke.worker.role_host import RoleHandlers
from twostroke.worker.steps.sharing import TimeSharing
from twostroke.worker.steps.work_loop import StreamSteps, WorkLoop


class Device(Protocol):
    """What stands for an engine thread."""

    def start(self, batch: Batch) -> asyncio.Future[StepResult]: ...

    def stop(self) -> None:
        """Stops a worker that has died."""


class WatchedRole:
    """The role, with what a simulated worker wants to be told besides."""

    def __init__(self, role: RoleHandlers, watch: StepWatch) -> None:
        self._role = role
        self._watch = watch

    def admitted(self, admission: AdmittedSequence) -> None:
        self._watch.admitted(admission)
        self._role.admitted(admission)

    def planning(self) -> None:
        self._role.planning()

    def preempted(self, sequence: KnownSequence) -> None:
        self._watch.preempted()
        self._role.preempted(sequence)

    def computed(self, step: Step, seconds: float) -> None:
        self._role.computed(step, seconds)

    def emitted(self, emissions: list[Emission]) -> None:
        self._role.emitted(emissions)

    def failed(self, sequences: list[KnownSequence], error: Exception) -> None:
        raise error

    def lost(self, error: Exception) -> None:
        raise error


class LiveLoop:
    def __init__(self, host: SimulatedWorkerView, device: Device, sharing: TimeSharing, rates: Rates) -> None:
        self._host = host
        self._device = device
        self._rates = rates
        engine: Any = device
        check: Any = SimpleNamespace(computed=lambda tokens: None)
        progress: Any = SimpleNamespace(notify=host.notify)
        self._loop = WorkLoop(host.scheduler, engine, host.metrics, progress, sharing, check, Profiler())
        self._task: asyncio.Task[None] | None = None

    @property
    def stream_steps(self) -> StreamSteps:
        return self._loop.stream_steps

    @property
    def budget(self) -> Budget:
        return self._loop.budget

    @property
    def cost(self) -> StepCost:
        return self._rates.cost

    @property
    def lends(self) -> bool:
        return self._loop.lends

    @property
    def queued_s(self) -> float:
        return self._loop.queued_s

    def wake(self) -> None:
        self._loop.wake()

    def run(self, role: RoleHandlers, watch: StepWatch) -> None:
        host, take_in = self._host, self._host.scheduler.update

        def updated(step: Step, result: StepResult) -> list[Emission]:
            terms = StepTerms.of(step.batch)
            begun_s, share = host.virtual_loop.time() - result.seconds, self.cost.prompt_fraction(terms)
            watch.ran(Flight(step, terms, begun_s, result.seconds, 0.0, share, (), 1))
            return take_in(step, result)

        vars(host.scheduler)["update"] = updated
        self._task = host.virtual_loop.create_task(self._loop.run(WatchedRole(role, watch), watch.prefetch))

    def stop(self) -> Flight | None:
        assert self._task is not None
        self._task.cancel()
        self._device.stop()
        return None
