"""Gives every HTTP request an id, the client's own where it sent one, and every response the header with it."""

from __future__ import annotations

import uuid

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.openai_http import error_response
from router.params import check_request_id
from twostroke.errors import InvalidRequest

REQUEST_ID_HEADER = "x-request-id"


class RequestIds:
    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        shown = Request(scope).headers.get(REQUEST_ID_HEADER, "")
        request_id = shown or uuid.uuid4().hex
        scope.setdefault("state", {}).update(request_id=request_id, is_id_drawn=not shown)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[REQUEST_ID_HEADER] = request_id
            await send(message)

        try:
            check_request_id(request_id, REQUEST_ID_HEADER)
        except InvalidRequest as error:
            await error_response(error)(scope, receive, send)
            return
        await self._app(scope, receive, send_with_id)
