"""The calls by which routers use a simulated decode worker: requests are opened and closed, and tokens are streamed.

This stands for the live decode service (`decode_worker.service`) and the router's connection to it.
"""

from __future__ import annotations

from collections.abc import Sequence

from decode_worker.request_manager import RequestManager
from router.serving.placement import source_forecast
from tools.simulate.fleet.event_queue import VirtualLoop
from tools.simulate.fleet.simulated_request import SimulatedRequest
from tools.simulate.fleet.worker.tokens import Hear, SimulatedStream
from twostroke.base.ids import RequestId
from twostroke.rpc.peer import PeerPrefix
from twostroke.rpc.v1 import worker_pb2


class SimulatedDecodeService:
    def __init__(self, request_manager: RequestManager, virtual_loop: VirtualLoop) -> None:
        self._request_manager = request_manager
        self._virtual_loop = virtual_loop
        self._open: dict[RequestId, SimulatedRequest] = {}
        self._hearing: dict[str, Hear] = {}
        """The routers that hear of tokens."""

    @property
    def open_requests(self) -> Sequence[SimulatedRequest]:
        """Requests that this worker owns."""
        return list(self._open.values())

    def open(
        self,
        request: SimulatedRequest,
        router_id: str,
        source: worker_pb2.PageSource | None,
        peer: worker_pb2.PageSource | None,
    ) -> None:
        """Raises Overloaded."""
        assert request.placement is not None
        decision = request.placement.decision
        prefix = None
        if peer is not None:
            prefix = PeerPrefix(peer, decision.peer_blocks, decision.forecast.peer_load_s)
        self._request_manager.open(request.attempt(router_id), source, prefix, source_forecast(decision))
        request.has_begun, request.peer_pages = False, 0
        self._open[request.request_id] = request

    def close(self, request: SimulatedRequest) -> None:
        """Closes a request whose router went away, or that nobody wants."""
        if self._open.pop(request.request_id, None) is not None:
            self._request_manager.close_request(request.request_id, request.attempts)

    def answered(self, request_id: RequestId) -> None:
        """Notes that a router has the whole answer."""
        self._open.pop(request_id, None)

    def stream(self, router_id: str, hear: Hear) -> None:
        """Tells a router of all tokens of its answers, from now on; it has one such stream."""
        if router_id not in self._hearing:
            self._hearing[router_id] = hear
            self._virtual_loop.call_soon(self._connect, router_id, hear)

    def end_stream(self, router_id: str) -> None:
        if self._hearing.pop(router_id, None) is not None:
            self._stream(router_id).disconnect()

    def end_streams(self) -> None:
        for router_id in list(self._hearing):
            self.end_stream(router_id)

    def _connect(self, router_id: str, hear: Hear) -> None:
        if self._hearing.get(router_id) is hear:
            self._stream(router_id).connect(hear)

    def _stream(self, router_id: str) -> SimulatedStream:
        stream = self._request_manager.output_stream(router_id)
        assert isinstance(stream, SimulatedStream)
        return stream
