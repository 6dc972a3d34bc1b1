"""Requests of KServe's protocol: messages of gRPC, and bodies of HTTP."""

from __future__ import annotations

import contextlib
import json
import random
import struct
from collections.abc import Iterator, Sequence
from typing import Any

from google.protobuf.message import DecodeError

from router.dialects.kserve.fields import OPTIONS, OTHERS
from router.dialects.kserve.infer import InferReply, id_of
from router.dialects.kserve.infer_json import InferJsonReply
from router.dialects.kserve.reply import GenerateReply
from router.dialects.kserve.schema import KServeRequest
from router.dialects.reply import JsonWithBytes
from router.preparation.prepare import prepare
from router.requests.resume import NoResumeTokens, StreamPoint
from router.requests.work import Work
from router.text.output.events import TextEvent, Usage
from router.text.tokenizer import ByteText
from tests.trials.chaos.fuzz.mutate import FLOATS, INTEGERS, TEXTS, mutate_bytes, mutate_json, mutate_message
from tests.trials.chaos.fuzz.target import Target, Try
from tests.unit.router.conftest import FACTS
from twostroke.request import FinishReason, SampledToken
from twostroke.rpc.v1 import kserve_pb2

TEXT = ByteText()
NAMES = (*OPTIONS, *OTHERS, "best_of", "sequence_id", "lora_name", "guided_json", "other")
PATHS = tuple(f"/v2/models/{{model:path}}/{method}" for method in ("generate", "generate_stream", "infer"))
REPLIES = {path: InferJsonReply if path.endswith("infer") else GenerateReply for path in PATHS}
SAMPLING = {"temperature": "0.5", "max_tokens": 5, "stop": ["x"], "logit_bias": {"7": 1}, "n": 2, "logprobs": "1"}


def events(wanted: KServeRequest) -> Iterator[TextEvent]:
    """Yields two tokens and the end of each choice."""
    for choice in range(wanted.options.n):
        for rank, token in enumerate((SampledToken(97, -0.5, ((97, -0.5),)), SampledToken(200, float("-inf")))):
            yield TextEvent(choice, "a", 3, rank + 1, token)
        is_last = choice == wanted.options.n - 1
        usage = Usage(3, 2 * wanted.options.n, 0) if is_last else None
        yield TextEvent(choice, "", 3, 2, finish=FinishReason.STOP, usage=usage)


@contextlib.contextmanager
def infer_message() -> Iterator[Try]:
    def attempt(data: bytes) -> None:
        assert isinstance(id_of(data), str)
        outcome = prepare(Work("kserve_infer", data, "toy", FACTS), TEXT)
        if outcome.error is not None:
            assert "\n" not in outcome.error.message
            return
        wanted: KServeRequest = outcome.value
        assert id_of(data) == wanted.id or data.count(b"\x1a") != 1, "the id is found without reading the message"
        reply = InferReply(wanted, wanted.options.n, "toy", TEXT)
        for event in events(wanted):
            reply.add(event)
            if wanted.stream:
                assert reply.responses(is_last=event.usage is not None)
        assert reply.response().outputs

    yield attempt


@contextlib.contextmanager
def bodies() -> Iterator[Try]:
    """The first byte says whose body it is. Where there is a zero byte, bytes follow the JSON behind it."""

    def attempt(data: bytes) -> None:
        path = PATHS[data[0] % len(PATHS)] if data else PATHS[0]
        fields = (("model", "toy"), ("version", "1"))
        head, zero, behind = data[1:].partition(b"\0")
        json_bytes = len(head) if zero else None
        outcome = prepare(Work(path, head + behind, "toy", FACTS, path_fields=fields, json_bytes=json_bytes), TEXT)
        if outcome.error is not None:
            assert "\n" not in outcome.error.message
            return
        wanted: KServeRequest = outcome.value
        point = StreamPoint.begin("r", wanted.options.n)
        reply = REPLIES[path](wanted, point, "toy", TEXT, NoResumeTokens())
        for event in events(wanted):
            if wanted.stream:
                json.loads(reply.messages(event).removeprefix("data: "))
            else:
                reply.add(event)
        body = None if wanted.stream else reply.body()
        assert json.dumps(body.json if isinstance(body, JsonWithBytes) else body, allow_nan=False)

    yield attempt


def _mutate_infer(data: bytes, draw: random.Random) -> bytes:
    """Changes a parameter, or anything else: maps are not fields that `mutate_message` changes."""
    if draw.randrange(3):
        return _CHANGE(data, draw)
    try:
        message = kserve_pb2.ModelInferRequest.FromString(data)
    except DecodeError:
        return _CHANGE(data, draw)
    parameter = message.parameters[draw.choice(NAMES)]
    match draw.randrange(4):
        case 0:
            parameter.int64_param = draw.choice([number for number in INTEGERS if -(2**63) <= number < 2**63])
        case 1:
            parameter.double_param = draw.choice(FLOATS)
        case 2:
            parameter.string_param = draw.choice((*TEXTS, '["a"]', '{"5": 1}', "nan", "[" * 3000))
        case _:
            parameter.bool_param = draw.randrange(2) == 1
    return message.SerializeToString()


def _mutate_body(data: bytes, draw: random.Random) -> bytes:
    first = draw.randrange(256) if not draw.randrange(8) else data[0] if data else 0
    head, zero, behind = data[1:].partition(b"\0")
    if zero and not draw.randrange(2):
        return bytes([first]) + head + zero + mutate_bytes(behind, draw)
    return bytes([first]) + mutate_json(head, draw) + zero + behind


def _value(value: str | bool) -> bytes:
    return bytes([value]) if isinstance(value, bool) else struct.pack("<I", len(value)) + value.encode()


def infer_seeds() -> Sequence[bytes]:
    """Returns a request of each dialect, raw and not."""
    seeds = []
    values: dict[str, Any] = {"text_input": "abc", "return_logprobs": True, "return_cumulative_logprob": True}
    for further in ({"streaming": True}, {"stream": False, "sampling_parameters": json.dumps(SAMPLING)}):
        for is_raw in (False, True):
            message = kserve_pb2.ModelInferRequest(model_name="toy", model_version="1", id="mine")
            message.parameters["max_tokens"].int64_param = 4
            message.parameters["triton_enable_empty_final_response"].bool_param = True
            message.outputs.add(name="text_output")
            for name, value in {**values, **further}.items():
                datatype = "BOOL" if isinstance(value, bool) else "BYTES"
                tensor = message.inputs.add(name=name, datatype=datatype, shape=[1])
                if is_raw:
                    message.raw_input_contents.append(_value(value))
                elif isinstance(value, bool):
                    tensor.contents.bool_contents.append(value)
                else:
                    tensor.contents.bytes_contents.append(value.encode())
            seeds.append(message.SerializeToString())
    return seeds


def _body_seeds() -> Sequence[bytes]:
    parameters = {"max_tokens": "4", "temperature": 0.5, "details": True, "timeout": 5_000_000, "priority": 1}
    generate = {"text_input": "abc", "id": "mine", "parameters": parameters, "return_logprobs": True}
    vllm = {"text_input": "abc", "stream": False, "sampling_parameters": json.dumps(SAMPLING)}
    tensors = [
        {"name": "text_input", "datatype": "BYTES", "shape": [1, 1], "data": [["abc"]]},
        {"name": "sampling_parameters", "datatype": "BYTES", "shape": [1], "data": [json.dumps(SAMPLING)]},
        {"name": "exclude_input_in_output", "datatype": "BOOL", "shape": [1], "data": [True]},
    ]
    infer = {"id": "mine", "inputs": tensors, "outputs": [{"name": "logprobs"}], "parameters": {"seed": "7"}}
    seeds = [bytes([rank]) + json.dumps(body).encode() for rank, body in ((0, vllm), (1, generate), (2, infer))]
    return [*seeds, bytes([2]) + _with_bytes({"text_input": "abc", "return_logprobs": True})]


def _with_bytes(values: dict[str, str | bool]) -> bytes:
    """Returns the body of `infer` with these inputs as bytes after the JSON, and a zero byte between."""
    raws = {name: _value(value) for name, value in values.items()}
    tensors = [
        {
            "name": name,
            "datatype": "BOOL" if isinstance(values[name], bool) else "BYTES",
            "shape": [1],
            "parameters": {"binary_data_size": len(raw)},
        }
        for name, raw in raws.items()
    ]
    body = {"inputs": tensors, "parameters": {"binary_data_output": True, "max_tokens": 4}}
    return json.dumps(body).encode() + b"\0" + b"".join(raws.values())


_CHANGE = mutate_message(kserve_pb2.ModelInferRequest)

KSERVE = [
    Target("kserve-message", infer_seeds(), _mutate_infer, infer_message),
    Target("kserve-bodies", _body_seeds(), _mutate_body, bodies),
]
