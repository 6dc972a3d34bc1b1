"""The HTTP endpoints: the OpenAI API with the helpers that vLLM adds, and health, as one ASGI application."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from router.auth.auth import Authenticator, Mark, NoAuthentication
from router.dialects.reply import JSON_LENGTH_HEADER, ErrorForm, Reply
from router.dialects.table import DIALECTS, Dialect, error_form_at
from router.endpoints.answer import AnswerResponse
from router.endpoints.errors import error_response
from router.endpoints.health_pages import HEALTH_PATHS, INDEX, HealthPages, with_index
from router.endpoints.middleware import Authentication
from router.endpoints.models import ModelPages
from router.endpoints.openapi import OPENAPI_PATH, ClientPage, OpenApiPage, OperatorCall
from router.http_server.exchange import EXCHANGE
from router.json_body import as_number
from router.requests.client_request import AnswerRequest, ClientRequest, check_timeout
from router.requests.params import check_request_id
from router.requests.request_handler import RequestHandler
from router.requests.resume import NoResumeTokens, SentProgress, StreamPoint
from router.requests.work import BesideBody
from twostroke.base import client_text
from twostroke.base.errors import (
    Cancelled,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    NotFound,
    RequestTooLarge,
    ServeError,
    UnsupportedMediaType,
)
from twostroke.observability.bug_log import log_bug
from twostroke.tracing.span import HEADER as TRACE_HEADER

log = logging.getLogger(__name__)

BODY_TIMEOUT_S = 60.0
"""Time for a whole request body to arrive."""

TIMEOUT_HEADER = "x-request-timeout-s"
LAST_EVENT_ID_HEADER = "last-event-id"
RESUMABLE_HEADER = "x-resumable-stream"
"""Header with the value `true` if the client wants to be able to resume the stream at another router. Clients that send
`last-event-id` want it, too."""
TENANT_HEADER = "x-tenant-id"
"""Header in which a gateway names its client's tenant. Clients must not be able to set it."""

OPEN_PATHS = HEALTH_PATHS | {"/metrics", INDEX, OPENAPI_PATH}
"""Paths that need no API key. `/metrics` is only served here if it has no port of its own. `/openapi.json` says nothing
about the cluster."""

Handler = Callable[[Request], Awaitable[ASGIApp]]
"""Handles a request, and returns the ASGI application that writes the response."""


def build_http_app(
    handler: RequestHandler,
    authenticator: Authenticator | None = None,
    *,
    max_body_bytes: int,
    with_metrics: bool = True,
    outer: Sequence[Middleware] = (),
    pages: Sequence[ClientPage] = (),
    operators: Sequence[OperatorCall] = (),
    further: Sequence[Route] = (),
) -> ASGIApp:
    """Builds the HTTP application. `outer` sees every request first. `pages` are pages of branches for clients,
    `operators` are calls that need the cluster's token, and `further` are routes that are not for clients.
    """
    endpoints, models = HttpEndpoints(handler, max_body_bytes), ModelPages(handler)
    answers = {each.path: _funnel(partial(endpoints.answer, each)) for each in DIALECTS}
    clients = [
        *(Route(path, answer, methods=["POST"]) for path, answer in answers.items()),
        Route("/v1/responses/input_tokens", _funnel(partial(endpoints.prepared, "input_tokens")), methods=["POST"]),
        Route("/v1/responses/{response:path}", _funnel(stored_response), methods=["GET", "POST", "DELETE"]),
        Route("/v1/models", _funnel(models.all), methods=["GET"]),
        Route("/v1/models/{model:path}", _funnel(models.one), methods=["GET"]),
        Route("/tokenize", _funnel(partial(endpoints.prepared, "tokenize")), methods=["POST"]),
        Route("/v1/messages/count_tokens", _funnel(partial(endpoints.prepared, "count_tokens")), methods=["POST"]),
        Route("/detokenize", _funnel(partial(endpoints.prepared, "detokenize")), methods=["POST"]),
        *(Route(each.path, _funnel(each.call), methods=["POST"]) for each in operators),
        *(Route(each.path, _funnel(each.page), methods=["GET"]) for each in pages),
        *HealthPages(handler).routes(with_metrics=with_metrics),
    ]
    takes_keys = authenticator is not None and authenticator.takes_keys
    open_paths = OPEN_PATHS.union(each.path for each in pages if each.is_open)
    openapi = OpenApiPage(clients, open_paths, operators, takes_keys=takes_keys)
    pages_app = Starlette(
        routes=with_index([*clients, openapi.route(), *further]), exception_handlers={HTTPException: _http_error}
    )
    app: ASGIApp = Authentication(
        AnswersFirst(answers, pages_app),
        authenticator=authenticator or NoAuthentication(),
        open_paths=open_paths.union(each.path for each in operators),
    )
    for wrapped in reversed(outer):
        app = wrapped.cls(app, *wrapped.args, **wrapped.kwargs)
    return app


class AnswersFirst:
    """Finds the handler of a POST by one lookup of its path. Everything else goes to `others`."""

    def __init__(self, answers: Mapping[str, Handler], others: ASGIApp) -> None:
        """Paths of `answers` that have parameters are left to `others`."""
        self._answers = {path: answer for path, answer in answers.items() if "{" not in path}
        self._others = others

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] not in self._answers:
            await self._others(scope, receive, send)
            return
        respond = await self._answers[scope["path"]](Request(scope, receive, send))
        await respond(scope, receive, send)


class HttpEndpoints:
    def __init__(self, handler: RequestHandler, max_body_bytes: int) -> None:
        self._handler = handler
        self._max_body_bytes = max_body_bytes

    async def prepared(self, kind: str, request: Request) -> Response:
        """Answers a request that needs only preparation."""
        check_content_type(request, takes_bytes=False)
        body = await self._prepare(request, kind, await self._body(request))
        return Response(body, media_type="application/json")

    async def answer(self, dialect: Dialect, request: Request) -> ASGIApp:
        check_content_type(request, takes_bytes=dialect.takes_bytes)
        body, auth = await self._body(request), request.state.auth
        received_s, received_at_s = time.monotonic(), time.time()
        deadline_s = _deadline(_header_timeout_s(request), received_at_s)
        json_bytes = _json_length(request, len(body)) if dialect.takes_bytes else None
        wanted = await self._prepare(request, dialect.path, body, deadline_s, json_bytes)
        assert isinstance(wanted, AnswerRequest)
        if wanted.removed_part:
            self._handler.metrics.count_removed_part(wanted.removed_part)
        tenant = auth.tenant_of(_named_tenant(request), TENANT_HEADER)
        choices, mark = len(wanted.prompts) * wanted.options.n, auth.marks(tenant)
        if token := request.headers.get(LAST_EVENT_ID_HEADER):
            point = _resumed(token, dialect, wanted, choices, mark)
        else:
            point = StreamPoint.begin(request.state.request_id, choices, mark)
        client_request = ClientRequest(
            body=wanted,
            point=point,
            is_id_drawn=request.state.is_id_drawn,
            is_resumable=_is_resumable(request, dialect, wanted),
            may_rename=True,
            clamps_length=dialect.clamps_length,
            # The header wins: proxies set it, and they know how long they will wait.
            deadline_s=_deadline(wanted.timeout_s, received_at_s) if deadline_s is None else deadline_s,
            tenant=tenant,
            auth=auth,
            client=_client_address(request),
            traceparent=request.headers.get(TRACE_HEADER, ""),
            received_s=received_s,
        )
        model = wanted.model or self._handler.model

        def reply() -> Reply:
            progress = SentProgress(point) if client_request.is_resumable else NoResumeTokens()
            return dialect.reply(wanted, point, model, self._handler.text, progress)

        return AnswerResponse(self._handler, client_request, reply, dialect.errors, stream=wanted.stream)

    async def _prepare(
        self,
        request: Request,
        kind: str,
        body: bytes,
        deadline_s: float | None = None,
        json_bytes: int | None = None,
    ) -> Any:
        state = request.state
        return await self._handler.prepare(
            kind,
            body,
            state.auth,
            client=_client_address(request),
            request_id=state.request_id,
            deadline_s=deadline_s,
            beside=BesideBody(tuple(request.path_params.items()), json_bytes, _named_tenant(request)),
        )

    async def _body(self, request: Request) -> bytes:
        """Returns the whole body. From then on, the request's task is cancelled when the client disconnects."""
        body = await read_body(request, self._max_body_bytes)
        exchange = request.scope.get("extensions", {}).get(EXCHANGE)
        if exchange is not None:
            exchange.end_with_client()
        return body


async def read_body(request: Request, most_bytes: int) -> bytes:
    """Returns the whole body.

    Raises RequestTooLarge, DeadlineExceeded if it arrives too slowly, or Cancelled if the client disconnects.
    """
    announced, body = request.headers.get("content-length", "0"), bytearray()
    too_large = RequestTooLarge(f"the body is larger than the {most_bytes} bytes that are allowed")
    if announced.isdecimal() and int(announced) > most_bytes:
        raise too_large
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for chunk in request.stream():
                body += chunk
                if len(body) > most_bytes:
                    raise too_large
    except TimeoutError as error:
        raise DeadlineExceeded(f"the request body did not arrive within {BODY_TIMEOUT_S:.0f} s") from error
    except ClientDisconnect as error:
        raise Cancelled("the client went away before its request was complete") from error
    return bytes(body)


async def stored_response(request: Request) -> Response:
    """Refuses all calls about a stored response, because this server stores none."""
    response = client_text.shown(request.path_params["response"])
    raise NotFound(f"there is no response {response}: this server stores none, whatever a request says in store")


def check_content_type(request: Request, *, takes_bytes: bool) -> None:
    """Refuses content types that are not read here, among them all that a browser sends without a preflight request.

    For a page of another origin, a browser sends forms and plain text without preflight, but no JSON and no bytes. A
    request that no browser sent may have no content type. tritonclient's asyncio client sends all bodies as bytes.
    """
    coding = request.headers.get("content-encoding", "identity")
    if coding.lower() != "identity":
        raise UnsupportedMediaType(f"Content-Encoding {coding[:100]!r} is not supported: send the body as it is")
    if JSON_LENGTH_HEADER in request.headers and not takes_bytes:
        raise UnsupportedMediaType(f"{JSON_LENGTH_HEADER}: this endpoint takes JSON alone")
    sent = request.headers.get("content-type")
    if sent is None and "origin" not in request.headers:
        return
    media_type = (sent or "").partition(";")[0].strip().lower()
    if media_type != "application/json" and not (takes_bytes and media_type == "application/octet-stream"):
        raise UnsupportedMediaType(f"Content-Type must be application/json, got {(sent or '')[:100]!r}")


def _named_tenant(request: Request) -> str:
    """Returns the tenant that a gateway names, or "". Raises InvalidRequest for a malformed name."""
    return check_request_id(request.headers.get(TENANT_HEADER, ""), TENANT_HEADER)


def _client_address(request: Request) -> str:
    return "" if request.client is None else request.client.host


def _json_length(request: Request, body_bytes: int) -> int | None:
    """Returns how many bytes of a body are JSON. None: the client does not say, so all are."""
    value = request.headers.get(JSON_LENGTH_HEADER)
    if value is None:
        return None
    if not (value.isascii() and value.isdecimal() and len(value) < 20 and 0 < int(value) <= body_bytes):
        raise InvalidRequest(
            f"{JSON_LENGTH_HEADER} must be a number from 1 to {body_bytes}, the bytes of the body, "
            f"got {client_text.shown(value)}",
            field=JSON_LENGTH_HEADER,
        )
    return int(value)


def _resumed(token: str, dialect: Dialect, wanted: AnswerRequest, choices: int, mark: Mark) -> StreamPoint:
    if not dialect.is_resumable:
        raise InvalidRequest(f"streams of {dialect.path} cannot be resumed", field=LAST_EVENT_ID_HEADER)
    if not wanted.stream:
        raise InvalidRequest(
            f"{LAST_EVENT_ID_HEADER} continues with a stream, but this request asks for a whole answer",
            field=LAST_EVENT_ID_HEADER,
        )
    return StreamPoint.after(token, choices, LAST_EVENT_ID_HEADER, mark)


def _is_resumable(request: Request, dialect: Dialect, wanted: AnswerRequest) -> bool:
    shown = request.headers.get(RESUMABLE_HEADER, "false").lower()
    if shown not in ("true", "false"):
        raise InvalidRequest(f"{RESUMABLE_HEADER} must be true or false, got {shown[:40]!r}", field=RESUMABLE_HEADER)
    return (
        dialect.is_resumable and wanted.stream and (shown == "true" or bool(request.headers.get(LAST_EVENT_ID_HEADER)))
    )


def _header_timeout_s(request: Request) -> float | None:
    shown = request.headers.get(TIMEOUT_HEADER)
    if shown is None:
        return None
    try:
        return check_timeout(as_number(float(shown), TIMEOUT_HEADER), TIMEOUT_HEADER)
    except ValueError as error:
        raise InvalidRequest(
            f"{TIMEOUT_HEADER} must be a number, got {client_text.shown(shown)}", field=TIMEOUT_HEADER
        ) from error


def _deadline(timeout_s: float | None, received_at_s: float) -> float | None:
    return None if timeout_s is None else received_at_s + timeout_s


def _funnel(handler: Handler) -> Handler:
    """Turns errors into bodies of the path's dialect (`AnswerResponse` does so for running requests)."""

    async def funnelled(request: Request) -> ASGIApp:
        try:
            return await handler(request)
        except ServeError as error:
            return error_response(error, _error_form(request), request.state.request_id)
        except Exception as error:
            log_bug(log, "internal error request=%s", request.state.request_id, error=error)
            internal = InternalError(f"internal error: {type(error).__name__}: {error}")
            return error_response(internal, _error_form(request), request.state.request_id)

    return funnelled


def _error_form(request: Request) -> ErrorForm:
    return error_form_at(request.url.path, request.headers)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = client_text.shown(request.url.path)
    form, request_id = _error_form(request), request.state.request_id
    if error.status_code == 404:
        return error_response(NotFound(f"there is nothing at {path}"), form, request_id)
    refused = error_response(InvalidRequest(f"{path}: {error.detail}"), form, request_id)
    refused.status_code = error.status_code
    refused.headers.update(error.headers or {})
    return refused
