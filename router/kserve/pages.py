"""Pages of KServe's protocol over HTTP: health and metadata of the server and its models."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from router.dialects.kserve.description import model_config, model_metadata, server_metadata
from router.dialects.kserve.schema import check_version
from router.endpoints.openapi import ClientPage
from router.requests.request_handler import RequestHandler

_MODEL, _VERSION = "/v2/models/{model:path}", "/versions/{version}"


class KServePages:
    def __init__(self, handler: RequestHandler) -> None:
        self._handler = handler

    def pages(self) -> list[ClientPage]:
        """Returns the pages. A model's name may have slashes, so the longest paths come first."""
        of_models = (("/ready", self._model_ready), ("/config", self._config), ("", self._model))
        return [
            ClientPage("/v2/health/live", self._live, is_open=True),
            ClientPage("/v2/health/ready", self._ready, is_open=True),
            ClientPage("/v2", self._server),
            *(ClientPage(f"{_MODEL}{_VERSION}{rest}", page) for rest, page in of_models),
            *(ClientPage(f"{_MODEL}{rest}", page) for rest, page in of_models),
        ]

    async def _live(self, _: Request) -> Response:
        return JSONResponse({"live": True})

    async def _ready(self, _: Request) -> Response:
        ready = is_ready(self._handler)
        return JSONResponse({"ready": ready}, status_code=200 if ready else 503)

    async def _server(self, _: Request) -> Response:
        return JSONResponse(server_metadata())

    async def _model_ready(self, request: Request) -> Response:
        name, ready = self._name(request), is_ready(self._handler)
        return JSONResponse({"name": name, "ready": ready}, status_code=200 if ready else 503)

    async def _model(self, request: Request) -> Response:
        return JSONResponse(model_metadata(self._name(request)))

    async def _config(self, request: Request) -> Response:
        return JSONResponse(model_config(self._name(request)))

    def _name(self, request: Request) -> str:
        """Returns the model's name. Raises NotFound if no such model is served in that version."""
        name: str = request.path_params["model"]
        self._handler.named(name)
        check_version(request.path_params.get("version", ""))
        return name


def is_ready(handler: RequestHandler) -> bool:
    """Returns whether this router takes new requests, like /ready."""
    return handler.dispatcher.is_ready and not handler.dispatcher.is_draining
