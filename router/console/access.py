"""Checks who calls the console's API, from which web page, and with which body."""

from __future__ import annotations

import contextlib
from typing import Any
from urllib.parse import urlsplit

from starlette.requests import Request

from router.auth.auth import AuthContext
from router.endpoints.app import read_body
from router.json_body import parse_json
from twostroke.base.errors import Forbidden, InvalidApiKey, InvalidRequest, UnsupportedMediaType

MOST_BODY_BYTES = 1 << 20
"""Most bytes of a body. The longest have a prompt whose blocks are searched."""


def check_caller(request: Request) -> AuthContext:
    """Returns what the caller may do.

    Raises InvalidApiKey if the caller is not an operator, and Forbidden for a call from another web page.
    """
    auth: AuthContext = request.state.auth
    if not auth.is_operator:
        raise InvalidApiKey(
            "the console takes an operator's key: `twostroke console` shows it, or `twostroke keys add --operator`",
            reason="wrong",
        )
    if not _is_from_our_page(request):
        raise Forbidden("the console takes calls from its own page only")
    return auth


def _is_from_our_page(request: Request) -> bool:
    """Returns whether a request comes from the console's page, or from no browser.

    Browsers send whether page and server have the same origin (Sec-Fetch-Site), but not over plain HTTP to another
    host. Then the host of the origin must be the one in the Host header.
    """
    site = request.headers.get("sec-fetch-site")
    if site is not None:
        return site in ("same-origin", "none")
    origin = request.headers.get("origin")
    if origin is None:
        return True
    with contextlib.suppress(ValueError):  # it is not an address
        return urlsplit(origin).netloc.lower() == request.headers.get("host", "").lower()
    return False


async def read_fields(request: Request, fields: dict[str, type]) -> dict[str, Any]:
    """Returns the body's fields, each that is missing with the empty value of its type.

    Raises InvalidRequest for a field that is unknown or of another type.
    """
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise UnsupportedMediaType(f"Content-Type must be application/json, got {media_type[:100]!r}")
    parsed = parse_json(await read_body(request, MOST_BODY_BYTES))
    for name in parsed:
        if name not in fields:
            raise InvalidRequest(f"{name[:60]!r} is not known here", field=name[:60])
    for name, kind in fields.items():
        value = parsed.get(name, kind())
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, kind) or isinstance(value, bool) != (kind is bool):
            raise InvalidRequest(f"{name} must be of type {kind.__name__}", field=name)
        parsed[name] = value
    return parsed
