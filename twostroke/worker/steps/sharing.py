"""How a worker shares time between its streams and the prompts that wait, here and at other workers of its host.

Workers that compute on a host's cores lend them to each other while they idle (`twostroke.engine.cores.cores`). So a
worker that runs nothing but streams pauses between steps while prompts wait at its neighbours, up to the step target.
Where a prompt would have its first token later than was promised, streams are as slow as was promised to them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from twostroke.engine.backends.built import Neighbours
from twostroke.scheduler.batching import Step
from twostroke.scheduler.cost import Budget
from twostroke.scheduler.lateness import WaitingPrompts, has_late, waiting_s
from twostroke.scheduler.scheduler import Scheduler
from twostroke.scheduler.step_target import StepTarget
from twostroke.worker.measured.rates import Rates


class TimeSharing:
    def __init__(
        self,
        scheduler: Scheduler,
        rates: Rates,
        target: StepTarget,
        clock_s: Callable[[], float],
        neighbours: Neighbours | None = None,
        *,
        promises: bool = True,
    ) -> None:
        """`promises`: whether requests have a promised time to the first token."""
        self._scheduler = scheduler
        self.rates = rates
        self._target = target
        self._clock_s = clock_s
        self._neighbours = neighbours
        self._promises = promises

    @property
    def budget(self) -> Budget:
        """Time budget of the next step in which streams run."""
        if self._target.is_fixed and not self._promises:
            return self._budget_for(WaitingPrompts())  # waiting prompts do not change the target
        return self._budget_for(self._prompts_here)

    @property
    def prompts_beside(self) -> WaitingPrompts:
        """Prompts that wait at other workers and are computed sooner with cores of this one."""
        return self._neighbours.prompts_beside() if self._neighbours is not None else WaitingPrompts()

    def pause_s(self, since_begin_s: float) -> float:
        """Returns for how long to run nothing, because prompts elsewhere gain more by this worker's cores.

        The latest step began `since_begin_s` ago.
        """
        prompts = self.prompts_beside
        streams = self._scheduler.load.lone_streams() if prompts.count else None
        return 0.0 if streams is None else self._budget_for(prompts).step_s(*streams) - since_begin_s

    def lend(self) -> None:
        """Lets the neighbours have the cores at once, for as long as this worker pauses."""
        if self._neighbours is not None:
            self._neighbours.lend()

    def report_waiting(self, step: Step | None) -> None:
        """Reports to the neighbours which prompts wait here, after this step was planned."""
        if self._neighbours is not None:
            computes_prompts = step is not None and step.batch.has_prompts
            self._neighbours.tell_prompts(self._prompts_here if computes_prompts else WaitingPrompts())

    @property
    def _prompts_here(self) -> WaitingPrompts:
        scheduler = self._scheduler
        count = scheduler.load.prompts
        due = list(scheduler.load.due_prompts()) if count else []
        prompts = WaitingPrompts(count, waiting_s=waiting_s(due, self.rates.cost, scheduler.step_tokens))
        if all(prompt.due_s is None for prompt in due):
            return prompts
        budget, queued = self._budget_for(prompts), scheduler.load.queued()
        is_late = has_late(due, queued, budget, scheduler.step_tokens, self._clock_s())
        return replace(prompts, has_late=is_late)

    def _budget_for(self, prompts: WaitingPrompts) -> Budget:
        target, rates = self._target, self.rates
        if prompts.has_late:
            return rates.budget(target.most_for_late_s(rates.cost))
        return rates.budget(target.most_s(rates.cost), None if target.is_fixed else prompts.waiting_s)
