"""The dialects in which clients ask for answers over HTTP: one line each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.message import Message

from router.dialects.anthropic.models import VERSION_HEADER
from router.dialects.anthropic.reply import ERRORS as ANTHROPIC_ERRORS
from router.dialects.anthropic.reply import AnthropicReply
from router.dialects.anthropic.schema import parse_messages
from router.dialects.grpc.schema import parse_generate as parse_grpc
from router.dialects.kserve.infer import parse_infer
from router.dialects.kserve.infer_json import BODY as INFER_BODY
from router.dialects.kserve.infer_json import InferJsonReply, parse_infer_json
from router.dialects.kserve.reply import ERRORS as KSERVE_ERRORS
from router.dialects.kserve.reply import GenerateReply
from router.dialects.kserve.schema import BODY, parse_generate, parse_generate_stream
from router.dialects.openai.reply import ERRORS as OPENAI_ERRORS
from router.dialects.openai.reply import OpenAIReply
from router.dialects.openai.schema import parse_chat, parse_completion
from router.dialects.reply import ErrorForm, Json, Reply
from router.dialects.responses.reply import ResponsesReply
from router.dialects.responses.schema import parse_response
from router.requests.client_request import AnswerRequest
from router.requests.resume import Progress, StreamPoint
from router.text.tokenizer import Text
from twostroke.rpc.v1 import inference_pb2, kserve_pb2

MakeReply = Callable[[Any, StreamPoint, str, Text, Progress], Reply]
"""Makes the reply to a request that the dialect's `parse` returned. The `str` is the name of the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    path: str
    """Path of the endpoint. `parse` gets the values of its parameters, such as `{model}`, as fields of the body."""
    parse: Callable[[Mapping[str, Any]], AnswerRequest]
    """Reads a body, before the request is admitted, in this or another process. Raises ServeError."""
    reply: MakeReply
    errors: ErrorForm
    is_resumable: bool = False
    """Whether a client can resume a stream at another router."""
    takes_bytes: bool = False
    """Whether bytes may follow the JSON of a body; `parse` gets them in `BYTES_FIELD`."""
    clamps_length: bool = False
    """Whether clients ask for more tokens than a context holds, and expect as many as fit."""
    body: Json = field(default_factory=dict)
    """JSON schema of the body, for a dialect whose body is not read by subclasses of `Body`."""


def _kserve(
    method: str,
    parse: Callable[[Mapping[str, Any]], AnswerRequest],
    reply: MakeReply = GenerateReply,
    *,
    takes_bytes: bool = False,
    body: Json = BODY,
) -> tuple[Dialect, ...]:
    """Returns the dialects of a method: one for the path with a version, one for the path without.

    Names of models may have slashes, so the path with a version must be matched first.
    """
    paths = "/v2/models/{model:path}/versions/{version}", "/v2/models/{model:path}"
    return tuple(
        Dialect(
            path=f"{path}/{method}",
            parse=parse,
            reply=reply,
            errors=KSERVE_ERRORS,
            takes_bytes=takes_bytes,
            body=body,
        )
        for path in paths
    )


DIALECTS: tuple[Dialect, ...] = (
    Dialect(path="/v1/chat/completions", parse=parse_chat, reply=OpenAIReply, errors=OPENAI_ERRORS, is_resumable=True),
    Dialect(path="/v1/completions", parse=parse_completion, reply=OpenAIReply, errors=OPENAI_ERRORS, is_resumable=True),
    Dialect(
        path="/v1/messages", parse=parse_messages, reply=AnthropicReply, errors=ANTHROPIC_ERRORS, clamps_length=True
    ),
    Dialect(path="/v1/responses", parse=parse_response, reply=ResponsesReply, errors=OPENAI_ERRORS, clamps_length=True),
    *_kserve("generate", parse_generate),
    *_kserve("generate_stream", parse_generate_stream),
    *_kserve("infer", parse_infer_json, InferJsonReply, takes_bytes=True, body=INFER_BODY),
)


@dataclass(frozen=True, slots=True)
class MessageDialect:
    """A dialect of gRPC: the type of its request message, and the function that reads it."""

    message: type[Message]
    parse: Callable[[Any], AnswerRequest]


MESSAGES: Mapping[str, MessageDialect] = {
    "grpc_generate": MessageDialect(inference_pb2.GenerateRequest, parse_grpc),
    "kserve_infer": MessageDialect(kserve_pb2.ModelInferRequest, parse_infer),
}
"""The dialects in which clients ask for answers over gRPC, by the `kind` that `RequestHandler.prepare` gets."""

_ERRORS_BELOW: tuple[tuple[str, ErrorForm], ...] = (("/v1/messages", ANTHROPIC_ERRORS), ("/v2", KSERVE_ERRORS))
"""Error forms by the beginning of the path. All other paths have the form of OpenAI's API."""


def error_form_at(path: str, headers: Mapping[str, str]) -> ErrorForm:
    """Returns the form of errors at a path, also if nothing is served there.

    Clients of Anthropic's and of OpenAI's API list models at the same path. A header of Anthropic's tells them apart.
    """
    if path.startswith("/v1/models") and VERSION_HEADER in headers:
        return ANTHROPIC_ERRORS
    return next((form for begins, form in _ERRORS_BELOW if path.startswith(begins)), OPENAI_ERRORS)
