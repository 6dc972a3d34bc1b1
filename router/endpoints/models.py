"""`/v1/models`: the models that are served, in the form of OpenAI's API and vLLM, or of Anthropic's for its clients."""

from __future__ import annotations

import time

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from router.dialects.anthropic.models import VERSION_HEADER, ListedModel, model_page
from router.dialects.reply import Json
from router.fleet.named_models import NamedModel
from router.requests.request_handler import RequestHandler


class ModelPages:
    def __init__(self, handler: RequestHandler) -> None:
        self._handler = handler
        self._created_s = int(time.time())

    async def all(self, request: Request) -> Response:
        named = self._handler.dispatcher.named_models
        if VERSION_HEADER in request.headers:
            listed = [self._listed(name) for name in (self._handler.model, *named)]
            return JSONResponse(model_page(listed, request.query_params))
        cards = [self._model_card(), *map(self._named_card, named.values())]
        return JSONResponse({"object": "list", "data": cards})

    async def one(self, request: Request) -> Response:
        name = request.path_params["model"]
        named = self._handler.named(name)
        if VERSION_HEADER in request.headers:
            return JSONResponse(self._listed(name).info)
        return JSONResponse(self._model_card() if named is None else self._named_card(named))

    def _listed(self, name: str) -> ListedModel:
        named = self._handler.dispatcher.named_models.get(name)
        created_s = self._created_s if named is None else int(named.loaded_s)
        return ListedModel(name=name, created_s=created_s, context_tokens=self._context_tokens)

    @property
    def _context_tokens(self) -> int | None:
        dispatcher = self._handler.dispatcher
        return dispatcher.facts.context_tokens if dispatcher.is_ready else None

    def _model_card(self) -> Json:
        card: Json = {
            "id": self._handler.model,
            "object": "model",
            "created": self._created_s,
            "owned_by": "twostroke",
            "root": self._handler.model,
            "parent": None,
        }
        if recommended := self._handler.recommended.given():
            card["recommended_sampling"] = recommended
        if self._context_tokens is not None:
            card["max_model_len"] = self._context_tokens
        return card

    def _named_card(self, named: NamedModel) -> Json:
        """Returns the card of a model that is served beside the main one. As in vLLM, its root is its folder."""
        own = {"id": named.name, "created": int(named.loaded_s), "root": named.ref.path}
        return {**self._model_card(), **own, "parent": self._handler.model}
