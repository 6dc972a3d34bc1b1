"""The prefill worker: a plain class without Ray. `PrefillActor` (`cluster/supervisor/actors.py`) runs it."""

from __future__ import annotations

import asyncio

from prefill_worker.branches import BRANCHES
from prefill_worker.jobs import BuildJobs
from twostroke.worker.host import WorkerHost
from twostroke.worker.worker import BaseWorker, RoleServices


class PrefillWorker(BaseWorker):
    BRANCHES = BRANCHES

    def mount(self, host: WorkerHost, tasks: asyncio.TaskGroup) -> RoleServices:
        return BuildJobs(host, tasks)
