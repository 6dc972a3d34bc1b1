"""Requests of KServe's protocol, over gRPC and HTTP, checked and turned into the router's own types."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from router.dialects.kserve.fields import ASKED_OUTPUTS, OF_REQUEST, OPTIONS, json_object, read_field
from router.dialects.openai.schema import top_k_of
from router.dialects.reply import Json
from router.json_body import as_number, checked_utf8, wrong_kind
from router.requests.client_request import AnswerRequest
from router.requests.params import AnswerOptions, check_request_id
from router.text.prompts import TextPrompt
from router.text.structured.fields import structured_output
from twostroke.base.client_text import shown
from twostroke.base.errors import InvalidRequest, NotFound, UnsupportedFeature

VERSION = "1"
"""The version of every model."""
TEXT_OUTPUT, FINISH_REASON = "text_output", "finish_reason"
OUTPUTS = (TEXT_OUTPUT, *ASKED_OUTPUTS.values())
MICROSECONDS = 1e6
"""Microseconds in a second: Triton's `timeout` is in microseconds."""

_OF_VLLM = frozenset({*ASKED_OUTPUTS, "stream", "sampling_parameters", "exclude_input_in_output"})
"""Inputs of Triton's vLLM backend that Dynamo does not have. One of them makes a request one of that backend's form."""
_ECHOING = frozenset({"stream", "sampling_parameters"})
"""Inputs whose clients expect the prompt before a whole answer, unless they say otherwise."""
_LOGPROBS = frozenset({"cumulative_logprob", "logprobs"})
"""Outputs that need the tokens' logprobs."""
_OF_BODY = frozenset({"parameters", "model", "version", "id"})
"""Fields of a JSON body that are not inputs."""


BODY: Json = {
    "type": "object",
    "properties": {"text_input": {"type": "string"}, "parameters": {"type": "object"}},
    "required": ["text_input"],
}
"""JSON schema of the bodies of `generate`. They may have other inputs, too."""


class KServeRequest(AnswerRequest):
    """One parsed request."""

    id: str = ""
    before: str = ""
    """Text that stands before the answer: its prompt, or nothing."""
    unfinished: str = ""
    """Finish reason of the responses before the last."""
    outputs: tuple[str, ...] = (TEXT_OUTPUT,)
    details: bool = False
    wants_empty_final: bool = False
    is_raw: bool = False
    """Over gRPC: whether values of tensors are in the raw contents of the request, and so of its responses."""
    binary_outputs: frozenset[str] = frozenset()
    """Over HTTP: outputs whose values are sent as bytes after the JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """What a client sent, before it is known whether it has the form of Triton's vLLM backend or of Dynamo."""

    model: str
    version: str
    id: str
    inputs: Mapping[str, Any]
    """Values by name of the input."""
    parameters: Mapping[str, Any]
    outputs: tuple[str, ...]
    """Outputs that the client named. Empty: the default outputs of its form."""
    as_tensors: bool
    """Whether inputs and outputs are tensors. The form is then Dynamo's, unless an input is of Triton's backend."""
    streams: bool | None = None
    """Whether the endpoint streams. None: an input of the request decides."""
    is_raw: bool = False


def parse_generate(body: Mapping[str, Any]) -> KServeRequest:
    return request_of(_received(body, streams=False))


def parse_generate_stream(body: Mapping[str, Any]) -> KServeRequest:
    return request_of(_received(body, streams=True))


def request_of(received: Received) -> KServeRequest:
    """Checks a request and returns it in the router's type. Raises InvalidRequest that names the field, or NotFound."""
    check_version(received.version)
    check_request_id(received.id, "id")
    inputs = {name: value for name, value in received.inputs.items() if value is not None}
    sampling = json_object("sampling_parameters", inputs.get("sampling_parameters", {}))
    fields = {
        **_fields(received.parameters, may_be_unknown=True),
        **_fields(sampling, may_be_unknown=False),
        **_fields(inputs, may_be_unknown=False),
    }
    if "text_input" not in fields:
        raise InvalidRequest("text_input is needed", field="text_input")
    stream, is_vllm = _streams(fields, received.streams), not _OF_VLLM.isdisjoint(inputs)
    outputs, details = _outputs(received, fields, is_vllm), bool(fields.get("details"))
    options = _options(fields, needs_logprobs=details or not _LOGPROBS.isdisjoint(outputs))
    if options.n > 1 and (stream or details):
        raise UnsupportedFeature("n above 1 is supported for whole answers without details alone", field="n")
    timeout = fields.get("timeout")
    given: dict[str, Any] = {name: fields[name] for name in OF_REQUEST if name in fields}
    return KServeRequest.read(
        {
            **given,
            "prompts": (TextPrompt(checked_utf8(fields["text_input"], "text_input")),),
            "options": options,
            "model": received.model,
            "stream": stream,
            "timeout": None if timeout is None else as_number(timeout, "timeout") / MICROSECONDS,
            "id": received.id,
            "before": _text_before(fields, inputs, stream),
            "unfinished": "None" if is_vllm else "",
            "outputs": outputs,
            "details": details,
            "wants_empty_final": bool(fields.get("triton_enable_empty_final_response")),
            "is_raw": received.is_raw,
        }
    )


def check_version(version: str) -> None:
    if version not in ("", VERSION):
        raise NotFound(f"there is no version {shown(version)}; every model has version {VERSION}", field="version")


def object_of(body: Mapping[str, Any], field: str) -> Mapping[str, Any]:
    """Returns an object that may be missing. Raises InvalidRequest for anything else."""
    value = {} if body.get(field) is None else body[field]
    if not isinstance(value, Mapping):
        raise wrong_kind(field, value, "an object")
    return value


def text_of(body: Mapping[str, Any], field: str) -> str:
    """Returns a text that may be missing. Raises InvalidRequest for anything else."""
    value = "" if body.get(field) is None else body[field]
    if not isinstance(value, str):
        raise wrong_kind(field, value, "a string")
    return value


def _received(body: Mapping[str, Any], *, streams: bool) -> Received:
    return Received(
        model=text_of(body, "model"),
        version=text_of(body, "version"),
        id=text_of(body, "id"),
        inputs={name: value for name, value in body.items() if name not in _OF_BODY},
        parameters=object_of(body, "parameters"),
        outputs=(),
        as_tensors=False,
        streams=streams,
    )


def _fields(sent: Mapping[str, Any], *, may_be_unknown: bool) -> dict[str, Any]:
    read = {
        name: read_field(name, value, may_be_unknown=may_be_unknown)
        for name, value in sent.items()
        if value is not None and name != "sampling_parameters"
    }
    return {name: value for name, value in read.items() if value is not None}


def _options(fields: Mapping[str, Any], *, needs_logprobs: bool) -> AnswerOptions:
    options = {name: fields[name] for name in OPTIONS if name in fields}
    options["top_k"] = top_k_of(options, 0, -1)
    if needs_logprobs:
        options.setdefault("logprobs", 0)
    return AnswerOptions.read({**options, "structured": structured_output(_structured_fields(fields))})


def _structured_fields(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the fields that constrain the output. vLLM calls `structured_outputs` what its Triton backend calls
    `guided_decoding`.
    """
    given = {name: fields[name] for name in ("response_format", "structured_outputs") if name in fields}
    if "guided_decoding" in fields:
        given.setdefault("structured_outputs", fields["guided_decoding"])
    return given


def _streams(fields: Mapping[str, Any], stream_field: bool | None) -> bool:
    name = "stream" if "stream" in fields else "streaming"
    wanted = bool(fields.get(name))
    if stream_field is False and wanted:
        raise InvalidRequest(f"{name}: this endpoint gives whole answers; generate_stream streams", field=name)
    return wanted if stream_field is None else stream_field


def _outputs(received: Received, fields: Mapping[str, Any], is_vllm: bool) -> tuple[str, ...]:
    """Returns the outputs of each response, in the order of `OUTPUTS`."""
    for name in received.outputs:
        if name not in OUTPUTS:
            raise InvalidRequest(f"there is no output {shown(name)}; there are {', '.join(OUTPUTS)}", field="outputs")
    asked = {TEXT_OUTPUT, *(output for name, output in ASKED_OUTPUTS.items() if fields.get(name))}
    if received.as_tensors and not is_vllm:
        asked.add(FINISH_REASON)
    wanted = frozenset(received.outputs) or asked
    return tuple(name for name in OUTPUTS if name in wanted)


def _text_before(fields: Mapping[str, Any], inputs: Mapping[str, Any], stream: bool) -> str:
    """Returns the prompt if the answer is to begin with it: on request, or by default as in Triton's vLLM backend."""
    excludes = fields.get("exclude_input_in_output")
    if excludes is False and stream:
        raise InvalidRequest("exclude_input_in_output must be true in a stream", field="exclude_input_in_output")
    begins = not stream and not _ECHOING.isdisjoint(inputs) if excludes is None else not excludes
    prompt: str = fields["text_input"]
    return prompt if begins else ""
