"""Serves the console's HTML, CSS and scripts from the package, with headers that keep other scripts and hosts out."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from importlib import resources

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from router.endpoints.middleware import CONSOLE_FILES, CONSOLE_PAGE

INDEX_FILE = "index.html"

MEDIA_TYPES: Mapping[str, str] = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
SECURITY_HEADERS: Mapping[str, str] = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
    ),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
"""Headers of the console's files and of its API's answers. Only our own script files run, no script is made from a
string, nothing is sent to other hosts, and no other web page can frame the console."""


class ConsoleFiles:
    """All files of the console. They are read once, when the router starts."""

    def __init__(self) -> None:
        folder = resources.files("router.console") / "static"
        self._files = {
            each.name: _File(each.read_bytes(), MEDIA_TYPES[each.name.rpartition(".")[2]]) for each in folder.iterdir()
        }

    def routes(self) -> list[Route]:
        return [
            Route(CONSOLE_PAGE, self._index, methods=["GET"]),
            Route(f"{CONSOLE_FILES}{{name}}", self._static, methods=["GET"]),
        ]

    async def _index(self, request: Request) -> Response:
        return self._files[INDEX_FILE].response(request)

    async def _static(self, request: Request) -> Response:
        file = self._files.get(request.path_params["name"])
        if file is None:
            return Response(status_code=404, headers=dict(SECURITY_HEADERS))
        return file.response(request)


class _File:
    def __init__(self, content: bytes, media_type: str) -> None:
        self._content = content
        self._headers = {
            **SECURITY_HEADERS,
            "content-type": media_type,
            "etag": f'"{hashlib.sha256(content).hexdigest()[:16]}"',
            "cache-control": "no-cache",
        }

    def response(self, request: Request) -> Response:
        if request.headers.get("if-none-match") == self._headers["etag"]:
            return Response(status_code=304, headers=self._headers)
        return Response(self._content, headers=self._headers)
