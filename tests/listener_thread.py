"""The listener of the gRPC port on a thread of the test: a process for each router would take longer than the tests."""

from __future__ import annotations

import asyncio
import os

from router.grpc_listener.listener import GrpcListener
from router.grpc_listener.running import ListenerProcess
from router.server import RouterServer


class ListenerThread(ListenerProcess):
    async def _serve(self, control: int) -> None:
        told = os.open(os.devnull, os.O_WRONLY)
        os.set_blocking(control, False)
        listening = self._listening.dup()
        listening.setblocking(False)
        try:
            loop = GrpcListener(listening, control, self.backend, self.most, None, told, is_shared=self._is_shared)
            await asyncio.to_thread(loop.run)
        finally:
            os.close(told)
            os.close(control)


class QuickRouterServer(RouterServer):
    listener = ListenerThread
