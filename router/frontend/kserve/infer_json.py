"""`infer` over HTTP: the tensors of one whole answer in JSON. Binary data behind the JSON are not offered."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from router.frontend.http.reply import LONG_BODY, Json
from router.frontend.json_body import wrong_kind
from router.frontend.kserve.answer_parts import ChoiceParts, Outputs
from router.frontend.kserve.description import INPUT_TYPES, OUTPUT_TYPES
from router.frontend.kserve.infer import check_tensor
from router.frontend.kserve.schema import VERSION, KServeRequest, Received, object_of, request_of, text_of
from router.frontend.output.events import TextEvent
from router.frontend.resume import SentProgress, StreamPoint
from router.frontend.text.tokenizer import Text
from twostroke.errors import InvalidRequest, ServeError, UnsupportedFeature

BINARY_HEADER = "inference-header-content-length"
"""Header that says how many bytes of a body are JSON, where tensors follow in binary."""
MOST_TENSORS = 64
"""Tensors that a message names; more than there are is a mistake in the client."""


def check_not_binary(headers: Mapping[str, str]) -> None:
    """Raises UnsupportedFeature for a body that is not JSON alone."""
    if BINARY_HEADER in headers:
        raise UnsupportedFeature(
            "tensors in binary are not supported over HTTP: set binary_data=False, or ask over gRPC",
            field=BINARY_HEADER,
        )


def parse_infer_json(body: Mapping[str, Any]) -> KServeRequest:
    values: dict[str, Any] = {}
    for tensor in _objects(body, "inputs"):
        name = text_of(tensor, "name")
        check_tensor(name, text_of(tensor, "datatype"), tensor.get("shape"), already=values)
        values[name] = _value(name, tensor)
    return request_of(
        Received(
            model=text_of(body, "model"),
            version=text_of(body, "version"),
            id=text_of(body, "id"),
            inputs=values,
            parameters=object_of(body, "parameters"),
            outputs=tuple(text_of(output, "name") for output in _objects(body, "outputs")),
            as_tensors=True,
            streams=False,
        )
    )


class InferJsonReply:
    def __init__(
        self, request: KServeRequest, point: StreamPoint, model: str, text: Text, progress: SentProgress
    ) -> None:
        del progress
        self._request = request
        self._outputs = Outputs(request, text)
        self._model = model
        self._choices = [ChoiceParts() for _ in point.sent]
        self._prompt_tokens = 0

    def add(self, event: TextEvent) -> None:
        self._choices[event.choice].add(event)
        self._prompt_tokens = event.prompt_tokens

    @property
    def is_long(self) -> bool:
        tokens = sum(len(choice.tokens) for choice in self._choices)
        return tokens * (1 + (self._request.options.logprobs or 0)) > LONG_BODY

    def body(self) -> Json:
        outputs = [
            {"name": name, "datatype": OUTPUT_TYPES[name], "shape": [len(values)], "data": list(values)}
            for name, values in self._outputs.of(self._choices, self._prompt_tokens)
        ]
        head = {"model_name": self._model, "model_version": VERSION}
        return {**({"id": self._request.id} if self._request.id else {}), **head, "outputs": outputs}

    def messages(self, event: TextEvent) -> str:
        raise AssertionError("infer does not stream")

    def end(self) -> str:
        raise AssertionError("infer does not stream")

    def failure(self, error: ServeError) -> str:
        raise AssertionError("infer does not stream") from error

    def beat(self) -> str:
        raise AssertionError("infer does not stream")


def _objects(body: Mapping[str, Any], field: str) -> list[Mapping[str, Any]]:
    entries = [] if body.get(field) is None else body[field]
    if not isinstance(entries, list) or any(not isinstance(entry, Mapping) for entry in entries):
        raise wrong_kind(field, entries, "a list of objects")
    if len(entries) > MOST_TENSORS:
        raise InvalidRequest(f"{field} has {len(entries)} entries; at most {MOST_TENSORS} are read", field=field)
    return entries


def _value(name: str, tensor: Mapping[str, Any]) -> str | bool:
    """Returns an input's one value, however deep the lists are that it stands in."""
    if "binary_data_size" in object_of(tensor, "parameters"):
        raise UnsupportedFeature(
            f"input {name} has binary data, which are not supported over HTTP: set binary_data=False", field=name
        )
    value, kind = tensor.get("data"), str if INPUT_TYPES[name] == "BYTES" else bool
    while isinstance(value, list) and len(value) == 1:
        (value,) = value
    if not isinstance(value, kind):
        raise wrong_kind(f"data of input {name}", value, "one text" if kind is str else "one of true and false")
    return value
