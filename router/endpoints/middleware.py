"""Middleware of all HTTP requests: request ids, authentication, and a guard against web pages of other origins.

A page of another origin can send some requests without a preflight, such as a POST of plain text. A page whose host
name resolves to 127.0.0.1 (DNS rebinding) has the same origin for the browser. Both could call a router that listens on
loopback and has no API keys.
"""

from __future__ import annotations

import ipaddress
import uuid
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.auth.auth import Authenticator
from router.dialects.table import error_form_at
from router.endpoints.errors import SHOULD_RETRY_HEADER, error_response
from router.requests.params import check_request_id
from twostroke.base.errors import (
    Forbidden,
    InvalidApiKey,
    InvalidRequest,
    MisdirectedRequest,
    RateLimitExceeded,
    ServeError,
)
from twostroke.config import EndpointsConfig

REQUEST_ID_HEADER = "x-request-id"
ANTHROPIC_ID_HEADER = "request-id"
"""Header from which Anthropic's clients read the request's id."""
KEY_HEADER = "x-api-key"


CONSOLE_PAGE, CONSOLE_FILES = "/console", "/console/static/"
"""Path of the console's page, and prefix of its files' paths. They need no key, because they hold nothing about the
cluster. The console's API needs an operator's key."""

PREFLIGHT_S = 600
"""Seconds for which a browser may cache the response to a preflight request."""


class Authentication:
    """Gives every request an id, the client's own if it sent one, and admits it with its API key until it ends.

    Every response has the id in its headers, unless the id was refused.
    """

    def __init__(self, app: ASGIApp, authenticator: Authenticator, open_paths: frozenset[str]) -> None:
        """`open_paths` need no API key of a client."""
        self._app = app
        self._open_paths = open_paths
        self._authenticator = authenticator

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        shown = headers.get(REQUEST_ID_HEADER, "")
        request_id = shown or uuid.uuid4().hex
        scope.setdefault("state", {}).update(request_id=request_id, is_id_drawn=not shown)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                shown_id = request_id.encode("latin-1")
                ids = (REQUEST_ID_HEADER.encode(), shown_id), (ANTHROPIC_ID_HEADER.encode(), shown_id)
                message = {**message, "headers": [*message.get("headers", ()), *ids]}
            await send(message)

        try:
            check_request_id(request_id, REQUEST_ID_HEADER)
        except InvalidRequest as error:
            await _refuse(error, scope, receive, send)
            return
        if self._is_open(scope["path"]):
            await self._app(scope, receive, send_with_id)
            return
        try:
            with self._authenticator.admit(_shown_key(headers)) as auth:
                scope["state"]["auth"] = auth
                await self._app(scope, receive, send_with_id)
        except (InvalidApiKey, RateLimitExceeded) as error:
            await _refuse(error, scope, receive, send_with_id)

    def _is_open(self, path: str) -> bool:
        return path in self._open_paths or path == CONSOLE_PAGE or path.startswith(CONSOLE_FILES)


async def _refuse(error: ServeError, scope: Scope, receive: Receive, send: Send) -> None:
    form = error_form_at(scope["path"], Headers(scope=scope))
    await error_response(error, form, scope.get("state", {}).get("request_id", ""))(scope, receive, send)


def _shown_key(headers: Headers) -> str | None:
    """Returns the API key as a bearer token. Anthropic's clients send it in `x-api-key`."""
    shown = headers.get("authorization")
    if shown is None and (key := headers.get(KEY_HEADER)) is not None:
        return f"Bearer {key}"
    return shown


class BrowserGuard:
    """Refuses requests whose Host or Origin is not allowed. A request that no browser sent has no Origin header."""

    def __init__(self, app: ASGIApp, hosts: frozenset[str], origins: frozenset[str]) -> None:
        self._app = app
        self._hosts = hosts
        self._origins = origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            host, origin = headers.get("host"), headers.get("origin")
            if host is not None and not self._is_ours(_name(host)):  # HTTP/1.0 may have none, and no browser speaks it
                error = MisdirectedRequest(f"Host: {host[:100]!r} is not a name of this server (--allowed-host)")
                await _refuse(error, scope, receive, send)
                return
            if origin is not None and not self._may_call(origin, host, scope["scheme"]):
                refused = Forbidden(f"Origin: {origin[:100]!r} may not call this server (--cors-origin)")
                await _refuse(refused, scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _is_ours(self, name: str) -> bool:
        return "*" in self._hosts or name in self._hosts or _is_loopback(name)

    def _may_call(self, origin: str, host: str | None, scheme: str) -> bool:
        return "*" in self._origins or origin in self._origins or origin.lower() == f"{scheme}://{host}".lower()


def browser_middleware(endpoints: EndpointsConfig, host: str) -> list[Middleware]:
    """Returns the middleware for browsers: CORS, and the guard. `host` is the address that the router listens on."""
    middleware = []
    if endpoints.cors_origins:
        cors = Middleware(
            CORSMiddleware,
            allow_origins=endpoints.cors_origins,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),
            expose_headers=(REQUEST_ID_HEADER, ANTHROPIC_ID_HEADER, "retry-after", SHOULD_RETRY_HEADER),
            max_age=PREFLIGHT_S,
        )
        middleware.append(cors)
    if endpoints.allowed_hosts or (endpoints.api_keys is None and _is_loopback(host)):
        hosts = frozenset(name.lower() for name in (*endpoints.allowed_hosts, host))
        middleware.append(Middleware(BrowserGuard, hosts=hosts, origins=frozenset(endpoints.cors_origins)))
    return middleware


def _name(host: str) -> str:
    """Returns the name or address in a Host header, without the port."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _is_loopback(name: str) -> bool:
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
