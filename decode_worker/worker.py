"""The decode worker: a plain class without Ray. `DecodeActor` (`cluster/supervisor/actors.py`) runs it."""

from __future__ import annotations

import asyncio

from decode_worker.branches import BRANCHES
from decode_worker.request_manager import RequestManager
from decode_worker.service import DecodeService
from twostroke.rpc.v1 import worker_pb2_grpc
from twostroke.worker.host import WorkerHost
from twostroke.worker.worker import BaseWorker, RoleServices


class DecodeWorker(BaseWorker):
    BRANCHES = BRANCHES

    def mount(self, host: WorkerHost, tasks: asyncio.TaskGroup) -> RoleServices:
        requests = RequestManager(host, tasks)
        service = DecodeService(requests, host.validator, host.branches)
        worker_pb2_grpc.add_DecodeServicer_to_server(service, host.rpc.server)
        host.rpc.offer("twostroke.v1.Decode")
        return requests
