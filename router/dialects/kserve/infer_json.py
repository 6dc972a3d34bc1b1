"""`infer` over HTTP: the tensors of one whole answer, in JSON or as bytes after the JSON.

Each input and output is either in the JSON or in the bytes. The bytes have the order of the tensors, and each tensor
says how many are its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from router.dialects.kserve.answer_parts import Outputs, Values, raw_bool, raw_output, raw_text
from router.dialects.kserve.description import INPUT_TYPES, OUTPUT_TYPES
from router.dialects.kserve.fields import flag
from router.dialects.kserve.infer import check_tensor
from router.dialects.kserve.schema import VERSION, KServeRequest, Received, object_of, request_of, text_of
from router.dialects.reply import Json, JsonWithBytes
from router.json_body import BYTES_FIELD, wrong_kind
from router.requests.resume import Progress, StreamPoint
from router.text.output.events import TextEvent
from router.text.tokenizer import Text
from twostroke.base.errors import InvalidRequest, ServeError, UnsupportedFeature

BODY: Json = {
    "type": "object",
    "properties": {"inputs": {"type": "array"}, "outputs": {"type": "array"}, "parameters": {"type": "object"}},
    "required": ["inputs"],
}
"""JSON schema of the bodies."""
MOST_TENSORS = 64
"""Most inputs, and most outputs, that a body may list. It is more than this server has."""
SIZE = "binary_data_size"
"""Parameter of a tensor whose values are in the bytes after the JSON: the number of these bytes."""

_OTHER_PLACES = ("shared_memory_region", "classification")
"""Parameters of tensors that are refused: they ask for values in shared memory, or for classes instead of values."""


def parse_infer_json(body: Mapping[str, Any]) -> KServeRequest:
    """Reads a body. Its field `BYTES_FIELD` has the bytes after the JSON."""
    parameters, outputs = object_of(body, "parameters"), _objects(body, "outputs")
    request = request_of(
        Received(
            model=text_of(body, "model"),
            version=text_of(body, "version"),
            id=text_of(body, "id"),
            inputs=_inputs(body),
            parameters=parameters,
            outputs=tuple(text_of(output, "name") for output in outputs),
            as_tensors=True,
            streams=False,
        )
    )
    by_default = flag("binary_data_output", parameters.get("binary_data_output") or False)
    named = {text_of(output, "name"): _is_binary(output, by_default) for output in outputs}
    binary = frozenset(name for name in request.outputs if named.get(name, by_default))
    return request.model_copy(update={"binary_outputs": binary})


class InferJsonReply:
    def __init__(self, request: KServeRequest, point: StreamPoint, model: str, text: Text, progress: Progress) -> None:
        del progress
        self._request = request
        self._outputs = Outputs(request, len(point.sent), text)
        self._model = model

    def add(self, event: TextEvent) -> None:
        self._outputs.add(event)

    @property
    def is_long(self) -> bool:
        return self._outputs.is_long

    def body(self) -> Json | JsonWithBytes:
        outputs, parts = [], []
        for name, values in self._outputs.by_name():
            entry, part = self._output(name, values)
            outputs.append(entry)
            parts.append(part)
        head = {"model_name": self._model, "model_version": VERSION}
        body = {**({"id": self._request.id} if self._request.id else {}), **head, "outputs": outputs}
        return JsonWithBytes(body, b"".join(parts)) if self._request.binary_outputs else body

    def _output(self, name: str, values: Values) -> tuple[Json, bytes]:
        """Returns an output's entry in the JSON, and its bytes after the JSON."""
        entry: Json = {"name": name, "datatype": OUTPUT_TYPES[name], "shape": [len(values)]}
        if name not in self._request.binary_outputs:
            return {**entry, "data": list(values)}, b""
        part = raw_output(OUTPUT_TYPES[name], values)
        return {**entry, "parameters": {SIZE: len(part)}}, part

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


def _inputs(body: Mapping[str, Any]) -> dict[str, str | bool]:
    left: bytes = body[BYTES_FIELD]
    values: dict[str, str | bool] = {}
    for tensor in _objects(body, "inputs"):
        name = text_of(tensor, "name")
        check_tensor(name, text_of(tensor, "datatype"), tensor.get("shape"), already=values)
        size = _binary_size(name, tensor)
        if size is None:
            values[name] = _value(name, tensor)
            continue
        if size > len(left):
            raise InvalidRequest(
                f"input {name} has {size} bytes after the JSON, where only {len(left)} are left", field=name
            )
        raw, left = left[:size], left[size:]
        values[name] = raw_text(name, raw) if INPUT_TYPES[name] == "BYTES" else raw_bool(name, raw)
    if left:
        raise InvalidRequest(f"{len(left)} bytes after the JSON belong to no input", field="inputs")
    return values


def _binary_size(name: str, tensor: Mapping[str, Any]) -> int | None:
    """Returns how many bytes after the JSON an input is. None: its value is in the JSON."""
    parameters = object_of(tensor, "parameters")
    _check_place(name, parameters)
    size = parameters.get(SIZE)
    if size is None:
        return None
    if not isinstance(size, int) or isinstance(size, bool) or size < 0:
        raise wrong_kind(f"{SIZE} of input {name}", size, "a number of bytes")
    if tensor.get("data") is not None:
        raise InvalidRequest(f"input {name} has both data and {SIZE}", field=name)
    return size


def _is_binary(output: Mapping[str, Any], by_default: bool) -> bool:
    """Returns whether an output that the client names goes after the JSON."""
    name, parameters = text_of(output, "name"), object_of(output, "parameters")
    _check_place(name, parameters)
    value = parameters.get("binary_data")
    return by_default if value is None else flag(f"binary_data of output {name}", value)


def _check_place(name: str, parameters: Mapping[str, Any]) -> None:
    for other in _OTHER_PLACES:
        if parameters.get(other) is not None:
            raise UnsupportedFeature(f"{other} of tensor {name} is not supported by this server", field=other)


def _value(name: str, tensor: Mapping[str, Any]) -> str | bool:
    """Returns the only value of an input, which may be in nested lists of one entry each."""
    value, kind = tensor.get("data"), str if INPUT_TYPES[name] == "BYTES" else bool
    while isinstance(value, list) and len(value) == 1:
        (value,) = value
    if not isinstance(value, kind):
        raise wrong_kind(f"data of input {name}", value, "one text" if kind is str else "one of true and false")
    return value
