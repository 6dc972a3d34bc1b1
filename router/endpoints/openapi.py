"""`/openapi.json`: a description of the endpoints for clients, made from the routes and the classes that read bodies.

It lists the fields of a body that are read, with their types. What their values mean is in the manual.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from router.dialects.anthropic.schema import FIELDS as MESSAGES_FIELDS
from router.dialects.anthropic.schema import OTHER_OPTIONS
from router.dialects.openai.schema import (
    CHAT_FIELDS,
    COMPLETION_FIELDS,
    ChatFields,
    DetokenizeBody,
    TextFields,
    TokenizeBody,
)
from router.dialects.reply import Json
from router.dialects.responses.schema import FIELDS as RESPONSES_FIELDS
from router.dialects.responses.schema import SAMPLING
from router.dialects.table import DIALECTS, Dialect, error_form_at
from router.json_body import Body
from router.requests.params import AnswerOptions
from twostroke import __version__
from twostroke.base.errors import InternalError

OPENAPI_PATH = "/openapi.json"


@dataclass(frozen=True, slots=True)
class ReadBody:
    kinds: tuple[type[Body], ...]
    """Classes that read the body. If several read a field, it has the schema of the first."""
    required: tuple[str, ...] = ()
    unread: Collection[str] = ()
    """Fields of `kinds` that this endpoint does not read."""
    objects: tuple[str, ...] = ()
    """Fields that none of `kinds` has, and whose values are objects."""


_FORMS = ("response_format", "structured_outputs")
_RESPONSE = ReadBody(
    RESPONSES_FIELDS, ("input",), frozenset(AnswerOptions.model_fields) - frozenset(SAMPLING), _FORMS[1:]
)
_OF_OTHERS = (*OTHER_OPTIONS, "stop", "user")
"""Fields that Anthropic's API does not have, or has under other names."""

BODIES: Mapping[str, ReadBody] = {
    "/v1/chat/completions": ReadBody(CHAT_FIELDS, ("messages",), objects=_FORMS),
    "/v1/completions": ReadBody(COMPLETION_FIELDS, ("prompt",), objects=_FORMS),
    "/v1/responses": _RESPONSE,
    "/v1/responses/input_tokens": _RESPONSE,
    "/v1/messages": ReadBody(
        MESSAGES_FIELDS, ("messages", "max_tokens"), _OF_OTHERS, (*_FORMS[1:], "output_config", "output_format")
    ),
    "/v1/messages/count_tokens": ReadBody(MESSAGES_FIELDS, ("messages",), _OF_OTHERS),
    "/tokenize": ReadBody((TokenizeBody, ChatFields, TextFields)),
    "/detokenize": ReadBody((DetokenizeBody,), ("tokens",)),
}

MADE = frozenset(
    {"prompts", "options", "is_chat", "custom_names", "given_tools", "had_billing_header"}
    | {"structured", "is_prompt_only"}
)
"""Fields that a dialect derives from others: clients do not send them."""

_TEXT_PATHS = frozenset({"/", "/health", "/ready", "/live", "/metrics"})


class ClientPage(NamedTuple):
    """A page that a branch serves to clients."""

    path: str
    page: Callable[[Request], Awaitable[Response]]
    is_open: bool = False
    """Whether it takes no key."""


@dataclass(frozen=True, slots=True)
class OperatorCall:
    """A call for operators, who have the cluster's token. Its body is a JSON object, and its response is text."""

    path: str
    call: Callable[[Request], Awaitable[Response]]
    field: str
    """The field that it needs."""


class OpenApiPage:
    """The page, whose document is made at the first request, on a thread: that takes some tenths of a second."""

    def __init__(
        self,
        routes: Sequence[Route],
        open_paths: frozenset[str],
        operators: Sequence[OperatorCall],
        *,
        takes_keys: bool,
    ) -> None:
        """`takes_keys`: whether a client needs an API key, but for `open_paths` and the paths of `operators`."""
        self._routes = routes
        self._operators = {each.path: each.field for each in operators}
        self._open_paths = open_paths
        self._takes_keys = takes_keys
        self._turn = asyncio.Lock()
        self._body = b""

    def route(self) -> Route:
        return Route(OPENAPI_PATH, self._page, methods=["GET"])

    async def _page(self, _: Request) -> Response:
        async with self._turn:
            if not self._body:
                self._body = await asyncio.to_thread(self._encoded)
        return Response(self._body, media_type="application/json")

    def _encoded(self) -> bytes:
        return json.dumps(self.document(), separators=(",", ":")).encode()

    def document(self) -> Json:
        paths: dict[str, Json] = {}
        for route in (*self._routes, self.route()):
            operations = paths.setdefault(_plain(route.path), {})
            for method in sorted((route.methods or set()) - {"HEAD"}):
                operations[method.lower()] = self._operation(route.path, method)
        keys = {
            "bearer": {"type": "http", "scheme": "bearer"},
            "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
        }
        return {
            "openapi": "3.1.0",
            "info": {"title": "twostroke", "version": __version__},
            "paths": paths,
            "components": {"securitySchemes": keys},
        }

    def _operation(self, path: str, method: str) -> Json:
        plain = _plain(path)
        names = re.findall(r"{(\w+)}", plain)
        parameters = [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names]
        operation: Json = {
            "operationId": "_".join([method.lower(), *re.findall(r"\w+", plain)]),
            "responses": {"200": _answers(path, path in self._operators), "default": _error(path)},
        }
        if parameters:
            operation["parameters"] = parameters
        content = _content(path)
        if path in self._operators:
            schema = {"type": "object", "properties": {self._operators[path]: {"type": "string"}}}
            content = {"application/json": {"schema": schema}}
        if content and method == "POST":
            operation["requestBody"] = {"required": True, "content": content}
        takes_key = path in self._operators or (self._takes_keys and path not in self._open_paths)
        operation["security"] = [{"bearer": []}, {"key": []}] if takes_key else []
        return operation


def _plain(path: str) -> str:
    """Returns a route's path without the kinds of its parameters."""
    return path.replace(":path}", "}")


def _dialect_at(path: str) -> Dialect | None:
    return next((each for each in DIALECTS if each.path == path), None)


def _content(path: str) -> Json:
    """Returns the media types of a path's bodies. Empty: the path takes no body."""
    if path in BODIES:
        return {"application/json": {"schema": body_schema(path)}}
    dialect = _dialect_at(path)
    if dialect is None:
        return {}
    content: Json = {"application/json": {"schema": dialect.body}}
    return {**content, "application/octet-stream": {}} if dialect.takes_bytes else content


def body_schema(path: str) -> Json:
    """Returns the JSON schema of the bodies of a path in `BODIES`."""
    properties: dict[str, Any] = {}
    body = BODIES[path]
    for name, schema in itertools.chain.from_iterable(map(_fields, body.kinds)):
        if name not in body.unread:
            properties.setdefault(name, schema)
    properties |= {name: _nullable({"type": "object"}) for name in body.objects}
    for name in body.required:
        alternatives = properties[name].get("anyOf", [])
        properties[name] = next((each for each in alternatives if each != {"type": "null"}), properties[name])
    return {"type": "object", "properties": properties, **({"required": list(body.required)} if body.required else {})}


def _fields(kind: type[Body]) -> Iterable[tuple[str, Json]]:
    """Yields the names and schemas of the fields that clients send. Each may be null, which means "not given"."""
    described = kind.model_json_schema()
    definitions = described.get("$defs", {})
    for name, schema in described["properties"].items():
        if name not in MADE:
            yield name, _nullable(_inlined(schema, definitions))


def _nullable(schema: Json) -> Json:
    null = {"type": "null"}
    return schema if not schema or null in schema.get("anyOf", []) else {"anyOf": [schema, null]}


def _inlined(schema: Any, definitions: Mapping[str, Any]) -> Any:
    """Returns a schema with references resolved, and without the titles, descriptions and defaults of pydantic."""
    if isinstance(schema, list):
        return [_inlined(each, definitions) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return _inlined(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    kept = {name: value for name, value in schema.items() if name not in ("title", "description", "default")}
    if "properties" in kept:
        kept["properties"] = {
            name: _nullable(_inlined(value, definitions)) for name, value in schema["properties"].items()
        }
    return {name: value if name == "properties" else _inlined(value, definitions) for name, value in kept.items()}


def _answers(path: str, is_operators: bool) -> Json:
    if path in _TEXT_PATHS or is_operators:
        kinds = ("text/plain", *(("application/openmetrics-text",) if path == "/metrics" else ()))
        return {"description": "the page", "content": {kind: {"schema": {"type": "string"}} for kind in kinds}}
    content: Json = {"application/json": {"schema": {"type": "object"}}}
    dialect = _dialect_at(path)
    if dialect is not None:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    if dialect is not None and dialect.takes_bytes:
        content["application/octet-stream"] = {}
    return {"description": "the answer", "content": content}


def _error(path: str) -> Json:
    """Describes the error responses of a path. Their schema is derived from one error."""
    form = error_form_at(path, {})
    body = {**form.body(InternalError("")), **({"request_id": ""} if form.has_request_id else {})}
    content: Json = {"application/json": {"schema": _shape(body)}}
    if path in _TEXT_PATHS:
        content["text/plain"] = {"schema": {"type": "string"}}
    return {"description": "an error", "content": content}


def _shape(value: Any) -> Json:
    if not isinstance(value, dict):
        return {"type": ["string", "null"]}
    properties = {name: _shape(each) for name, each in value.items()}
    return {"type": "object", "properties": properties, "required": list(properties)}
