"""The decode worker: a plain class; `ray.remote(DecodeWorker)` is the whole actor."""

from __future__ import annotations

import asyncio

from decode_worker.branches import BRANCHES
from decode_worker.request_manager import RequestManager
from twostroke.worker.host import WorkerHost
from twostroke.worker.worker import BaseWorker, RoleServices


class DecodeWorker(BaseWorker):
    BRANCHES = BRANCHES

    def mount(self, host: WorkerHost, tasks: asyncio.TaskGroup) -> RoleServices:
        return RequestManager(host, tasks)
