"""Messages of KServe's protocol over gRPC: tensors in, and tensors out."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any

from router.dialects.kserve.answer_parts import (
    Outputs,
    Values,
    decoded_text,
    encoded_texts,
    raw_bool,
    raw_output,
    raw_text,
)
from router.dialects.kserve.description import INPUT_TYPES, OUTPUT_TYPES
from router.dialects.kserve.schema import FINISH_REASON, TEXT_OUTPUT, VERSION, KServeRequest, Received, request_of
from router.text.tokenizer import Text
from twostroke.base.client_text import shown
from twostroke.base.errors import InvalidRequest
from twostroke.rpc.v1 import kserve_pb2

FINAL = "triton_final_response"
"""Parameter of responses: no more come for the request."""
MOST_FIELDS_BEFORE_ID = 16
"""Fields of a message that are looked through for its id: it is written before inputs."""

_PLAIN = frozenset({TEXT_OUTPUT, FINISH_REASON})
"""Outputs of which only the text differs between the responses before the last."""
_ID_FIELD = 3

_Input = kserve_pb2.ModelInferRequest.InferInputTensor


def parse_infer(message: kserve_pb2.ModelInferRequest) -> KServeRequest:
    """Raises InvalidRequest that names the input or field, or NotFound."""
    return request_of(
        Received(
            model=message.model_name,
            version=message.model_version,
            id=message.id,
            inputs=_inputs(message),
            parameters=parameters_of(message.parameters),
            outputs=tuple(output.name for output in message.outputs),
            as_tensors=True,
            is_raw=bool(message.raw_input_contents),
        )
    )


def parameters_of(sent: Mapping[str, kserve_pb2.InferParameter]) -> dict[str, Any]:
    """Returns the values by name. A parameter without one is as if it was not there."""
    kinds = {name: parameter.WhichOneof("parameter_choice") for name, parameter in sent.items()}
    return {name: getattr(sent[name], kind) for name, kind in kinds.items() if kind is not None}


def id_of(raw: bytes) -> str:
    """Returns the id of a serialized request without reading the rest, which may be large. Empty: it has none.

    It is called for requests that cannot be read, too.
    """
    at = 0
    for _ in range(MOST_FIELDS_BEFORE_ID):
        tag, at = _varint(raw, at)
        if tag & 7 != 2:  # every field of a request is length-delimited
            return ""
        length, at = _varint(raw, at)
        if tag >> 3 == _ID_FIELD:
            return raw[at : at + length].decode(errors="replace")
        at += length
    return ""


def check_tensor(name: str, datatype: str, shape: Any, already: Container[str]) -> None:
    """Raises InvalidRequest that names an input that is unknown, is there `already`, has another datatype, or has not
    exactly one value.

    `shape` is a sequence of lengths, or whatever the client sent instead.
    """
    if name not in INPUT_TYPES:
        known = ", ".join(INPUT_TYPES)
        raise InvalidRequest(f"there is no input {shown(name)}; there are {known}", field="inputs")
    if name in already:
        raise InvalidRequest(f"input {name} is there twice", field=name)
    if datatype != INPUT_TYPES[name]:
        wanted = INPUT_TYPES[name]
        raise InvalidRequest(f"input {name} must have datatype {wanted}, got {shown(datatype)}", field=name)
    if not isinstance(shape, Sequence) or tuple(shape[:3]) not in ((1,), (1, 1)):
        got = list(shape[:8]) if isinstance(shape, Sequence) else shape
        raise InvalidRequest(f"input {name} must have one value: shape [1], got {shown(str(got))}", field=name)


class InferReply:
    """Makes the responses to one request from its events."""

    def __init__(self, request: KServeRequest, choices: int, model: str, text: Text) -> None:
        self._request = request
        self._model = model
        self._outputs = Outputs(request, choices, text)
        self.add = self._outputs.add
        self._frame: kserve_pb2.ModelInferResponse | None = None
        """A response of a stream that is not the last, without its text, where they differ in nothing else."""
        self._is_plain = _PLAIN.issuperset(request.outputs) and TEXT_OUTPUT in request.outputs and choices == 1

    @property
    def says_nothing_yet(self) -> bool:
        """Whether a response would say nothing: the text of every choice is held back until more of it is known."""
        return all(choice.says_nothing_yet for choice in self._outputs.choices)

    def response(self) -> kserve_pb2.ModelInferResponse:
        """Returns what has been added since the last response."""
        response = self._head()
        for name, values in self._outputs.by_name():
            output = response.outputs.add(name=name, datatype=OUTPUT_TYPES[name], shape=[len(values)])
            if self._request.is_raw:
                response.raw_output_contents.append(raw_output(OUTPUT_TYPES[name], values))
            else:
                _fill(output.contents, OUTPUT_TYPES[name], values)
        self._outputs.begin_next()
        return response

    def responses(self, *, is_last: bool) -> list[kserve_pb2.ModelInferResponse]:
        """Returns the responses of a stream for what has been added. The last one says that it is.

        A client may ask for an empty one at the end.
        """
        if self._is_plain and not is_last:
            return [self._framed()]
        response, ends_empty = self.response(), is_last and self._request.wants_empty_final
        response.parameters[FINAL].bool_param = is_last and not ends_empty
        if not ends_empty:
            return [response]
        empty = self._head()
        empty.parameters[FINAL].bool_param = True
        return [response, empty]

    def _framed(self) -> kserve_pb2.ModelInferResponse:
        (choice,) = self._outputs.choices
        text = "".join(choice.texts)
        choice.texts.clear()
        if self._frame is None:
            self._frame = self.response()
            self._frame.parameters[FINAL].bool_param = False
        response = kserve_pb2.ModelInferResponse()
        response.CopyFrom(self._frame)
        index = self._request.outputs.index(TEXT_OUTPUT)
        if self._request.is_raw:
            response.raw_output_contents[index] = raw_output("BYTES", [text])
        else:
            response.outputs[index].contents.bytes_contents[0] = text.encode(errors="replace")
        choice.tokens.clear()
        return response

    def _head(self) -> kserve_pb2.ModelInferResponse:
        return kserve_pb2.ModelInferResponse(model_name=self._model, model_version=VERSION, id=self._request.id)


def _inputs(message: kserve_pb2.ModelInferRequest) -> dict[str, Any]:
    raws = message.raw_input_contents
    if raws and len(raws) != len(message.inputs):
        raise InvalidRequest(
            f"raw_input_contents has {len(raws)} entries for {len(message.inputs)} inputs", field="raw_input_contents"
        )
    values: dict[str, Any] = {}
    for index, tensor in enumerate(message.inputs):
        check_tensor(tensor.name, tensor.datatype, tensor.shape, already=values)
        values[tensor.name] = _value(tensor, raws[index] if raws else None)
    return values


def _value(tensor: _Input, raw: bytes | None) -> Any:
    """Returns an input's one value."""
    if INPUT_TYPES[tensor.name] == "BOOL":
        return raw_bool(tensor.name, bytes(tensor.contents.bool_contents) if raw is None else raw)
    if raw is not None:
        return raw_text(tensor.name, raw)
    if len(tensor.contents.bytes_contents) != 1:
        raise InvalidRequest(f"input {tensor.name} must have one entry in bytes_contents", field=tensor.name)
    return decoded_text(tensor.name, tensor.contents.bytes_contents[0])


def _fill(contents: kserve_pb2.InferTensorContents, datatype: str, values: Values) -> None:
    match datatype:
        case "BYTES":
            contents.bytes_contents.extend(encoded_texts(values))
        case "FP32":
            contents.fp32_contents.extend(values)  # type: ignore[arg-type]  # numbers, as the datatype says
        case _:
            contents.uint_contents.extend(values)  # type: ignore[arg-type]  # likewise


def _varint(raw: bytes, at: int) -> tuple[int, int]:
    """Returns the number that begins at `at`, and where it ends.

    For bytes that are no varint the result has no meaning.
    """
    number = 0
    for index, byte in enumerate(raw[at : at + 10]):
        number |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            return number, at + index + 1
    return 0, len(raw)
