"""The console's calls: JSON for operators, below /console/api. The console is a branch of the router."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from router.console import block_map, explanation, request_list
from router.console.access import check_caller, read_fields
from router.console.fleet_view import FleetView, Shared, rendered
from router.console.static_files import SECURITY_HEADERS, ConsoleFiles
from router.dialects.openai.reply import ERRORS
from router.endpoints.errors import error_response
from router.pins import forms
from router.pins.admin import PinAdmin
from router.requests.request_handler import RequestHandler
from router.server_branch import RouterBranch, RouterParts, SupervisorCalls
from twostroke import __version__
from twostroke.base.errors import InternalError, InvalidRequest, NotFound, PeerLost, ServeError
from twostroke.observability.bug_log import log_bug
from twostroke.rpc.v1 import control_pb2, fleet_pb2, pins_pb2
from twostroke.rpc.v1.fleet_pb2_grpc import FleetStub
from twostroke.rpc.waterfall import ROOT, lines_of, missing_of
from twostroke.tracing.recorder import MOST_REQUESTS, Recorder

log = logging.getLogger(__name__)

LONGEST_DRAIN_S = 3600.0
ANSWER_S = 120.0
"""Seconds beyond the deadline for a drain, or for a switch of roles: what is open is handed over, and a worker that
restarts loads its model."""

DRAIN_FIELDS: dict[str, type] = {"worker": str, "deadline_s": float, "restart": bool, "force": bool}
ROLE_FIELDS: dict[str, type] = {"worker": str, "role": str}

API = "/console/api"
JSON = "application/json"
Call = Callable[[Request], Awaitable[dict[str, Any] | bytes]]
"""Handles a request. Returns the values of the reply, or its JSON if several viewers share it."""


class Console(RouterBranch):
    def __init__(self, parts: RouterParts) -> None:
        actions, pins = FleetActions(parts.supervisor), PinAdmin(parts.handler, parts.supervisor)
        api = ConsoleApi(parts.handler, parts.recorder, actions, pins, router_id=parts.router_id)
        self.routes = (*ConsoleFiles().routes(), *api.routes())


class ConsoleApi:
    def __init__(
        self, handler: RequestHandler, recorder: Recorder, actions: FleetActions, pins: PinAdmin, *, router_id: str
    ) -> None:
        self._handler = handler
        self._recorder = recorder
        self._actions = actions
        self._pins = pins
        self._router_id = router_id
        view = FleetView(handler, router_id)
        self._fleet = Shared(view.take_snapshot)
        self._latest = Shared(lambda: self._listed(request_list.latest_of(recorder.latest(request_list.MOST_LISTED))))
        self._slowest = Shared(lambda: self._listed(request_list.slowest_of(recorder.slowest())))

    def routes(self) -> list[Route]:
        reads: dict[str, Call] = {
            "about": self._about,
            "fleet": self._fleet_now,
            "requests": self._requests,
            "request": self._request,
            "pins": self._list_pins,
        }
        writes: dict[str, Call] = {
            "blocks": self._blocks,
            "drain": partial(self._act, self._actions.drain, DRAIN_FIELDS),
            "role": partial(self._act, self._actions.assign_role, ROLE_FIELDS),
            "pins/add": self._add_pin,
            "pins/remove": self._remove_pin,
        }
        return [
            *(Route(f"{API}/{name}", _answering(call), methods=["GET"]) for name, call in reads.items()),
            *(Route(f"{API}/{name}", _answering(call), methods=["POST"]) for name, call in writes.items()),
        ]

    async def _about(self, _: Request) -> dict[str, Any]:
        """Returns facts about the router and the model that seldom change."""
        dispatcher = self._handler.dispatcher
        about = {
            "router": self._router_id,
            "version": __version__,
            "model": self._handler.model,
            "named_models": sorted(dispatcher.named_models),
            "recommended": self._handler.recommended.given(),
        }
        try:
            facts = dispatcher.facts
        except PeerLost:
            return about
        form = facts.kv_form
        return {
            **about,
            "max_model_len": facts.context_tokens,
            "block_size": facts.block_size,
            "page_bytes": facts.page_bytes,
            "dtype": facts.dtype,
            "kv_form": form.format + (f" from {form.converted_from}" if form.converted_from else ""),
        }

    async def _fleet_now(self, request: Request) -> bytes:
        return self._fleet.get().answer(request.query_params.get("find", "")[:100])

    async def _requests(self, request: Request) -> bytes:
        is_slowest = request.query_params.get("order") == "slowest"
        return (self._slowest if is_slowest else self._latest).get()

    def _listed(self, lines: list[dict[str, Any]]) -> bytes:
        return rendered({"router": self._router_id, "at_s": time.time(), "requests": lines})

    async def _request(self, request: Request) -> dict[str, Any]:
        """Returns the waterfall of one request and its explanation, from the spans that router and workers keep."""
        name = request.query_params.get("id", "")[:400]
        known = await self._handler.dispatcher.operations.trace(name)
        if not known.stream or not known.spans:
            raise NotFound(_why_not(name, is_forgotten=known.forgotten))
        return {"router": self._router_id, **_explained(known)}

    async def _blocks(self, request: Request) -> dict[str, Any]:
        fields = await read_fields(request, block_map.FIELDS)
        return await block_map.blocks_of(self._handler, fields, request.state.auth)

    async def _act(
        self, act: Callable[[dict[str, Any]], Awaitable[str]], fields: dict[str, type], request: Request
    ) -> dict[str, Any]:
        given = await read_fields(request, fields)
        log.info("operator acts path=%s request=%s fields=%s", request.url.path, request.state.request_id, given)
        return {"done": await act(given)}

    async def _list_pins(self, _: Request) -> dict[str, Any]:
        return forms.listed(await self._pins.List(pins_pb2.ListPinsRequest()))

    async def _add_pin(self, request: Request) -> dict[str, Any]:
        added = await self._pins.Add(forms.add_request(await read_fields(request, forms.ADD_FIELDS)))
        log.info("operator pinned pin=%s request=%s", added.pin_id, request.state.request_id)
        return {"done": f"pin {added.pin_id}: {added.pinned_tokens} of {added.tokens} tokens are pinned"}

    async def _remove_pin(self, request: Request) -> dict[str, Any]:
        wanted = forms.remove_request(await read_fields(request, forms.REMOVE_FIELDS))
        log.info("operator removes pin=%s request=%s", wanted.pin_id, request.state.request_id)
        removed = (await self._pins.Remove(wanted)).removed
        return {"done": f"pin {wanted.pin_id} is removed" if removed else f"there is no pin {wanted.pin_id}"}


class FleetActions:
    """What operators do to workers, by the supervisor's calls: it drains them and switches their roles."""

    def __init__(self, supervisor: SupervisorCalls) -> None:
        self._supervisor = supervisor

    async def drain(self, fields: dict[str, Any]) -> str:
        """Drains a worker. Returns what happened in words, once the worker has left or serves again.

        Raises the supervisor's errors.
        """
        worker, deadline_s = _worker_in(fields), fields["deadline_s"]
        if not (math.isfinite(deadline_s) and 0 <= deadline_s <= LONGEST_DRAIN_S):
            raise InvalidRequest(f"deadline_s must be from 0 to {LONGEST_DRAIN_S:.0f} seconds", field="deadline_s")
        request = fleet_pb2.DrainWorkerRequest(
            worker_id=worker, deadline_s=deadline_s, restart=fields["restart"], force=fields["force"]
        )
        left = (await self._supervisor.ask(FleetStub, "DrainWorker", request, deadline_s + ANSWER_S)).open_requests
        cut = f"; {left} requests were cut off and continue elsewhere" if left else ""
        return f"{worker} {'serves again' if fields['restart'] else 'has left'}{cut}"

    async def assign_role(self, fields: dict[str, Any]) -> str:
        worker, role = _worker_in(fields), fields["role"]
        await self._supervisor.ask(
            FleetStub, "AssignRole", fleet_pb2.AssignRoleRequest(worker_id=worker, role=role), ANSWER_S
        )
        fixed = "the number of workers of each role stays fixed until: twostroke scale --auto"
        return f"{worker} serves as a {role} worker; {fixed}"


def _worker_in(fields: dict[str, Any]) -> str:
    if not fields["worker"]:
        raise InvalidRequest("a worker must be named", field="worker")
    return str(fields["worker"])


def _explained(known: control_pb2.GetTraceResponse) -> dict[str, Any]:
    spans = explanation.spans_of(known.spans)
    return {
        "stream": known.stream,
        "trace_id": known.spans[0].trace_id,
        "start_s": min(span.start_s for span in spans),
        "length_s": max(span.end_s for span in spans) - min(span.start_s for span in spans),
        "is_open": not any(span.name == ROOT for span in spans),
        "lines": [asdict(line) for line in lines_of(known.spans) if line.name != explanation.CANDIDATE],
        "missing": missing_of(known.spans),
        "silent": list(known.silent),
        "parts": explanation.parts_of(spans),
        "remarks": explanation.remarks_on(spans),
        "choice": explanation.choice_of(spans),
    }


def _why_not(name: str, *, is_forgotten: bool) -> str:
    if is_forgotten:
        return (
            f"request {name!r} is too long ago: the latest {MOST_REQUESTS} are kept, and the slowest of the last minute"
        )
    return f"this router and its workers know no request {name!r}"


def _answering(call: Call) -> Callable[[Request], Awaitable[Response]]:
    """Returns the handler of a call. It checks the operator's key first, and turns errors into OpenAI's bodies."""

    async def answer(request: Request) -> Response:
        try:
            check_caller(request)
            reply = await call(request)
            response: Response = Response(reply if isinstance(reply, bytes) else rendered(reply), media_type=JSON)
        except ServeError as error:
            response = error_response(error, ERRORS)
        except Exception as error:
            log_bug(log, "internal error of the console", error=error)
            response = error_response(InternalError(f"internal error: {type(error).__name__}: {error}"), ERRORS)
        response.headers.update({**SECURITY_HEADERS, "cache-control": "no-store"})
        return response

    return answer
