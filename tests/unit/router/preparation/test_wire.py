"""What crosses the border to the processes that read strangers' bytes: values of declared types, and never code."""

from __future__ import annotations

import json
import pickle
from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import pytest

from router.preparation import wire
from router.preparation.prepare import prepare
from router.preparation.wire import BrokenMessage, packed, unpacked
from router.requests.params import AnswerOptions
from router.requests.work import PreparationOutcome, Work
from router.text.output.parsing import OutputFormats, Parsing
from router.text.prompts import TokenPrompt
from router.text.structured.compile import Refusal
from router.text.structured.output import StructuredOutput
from router.text.tokenizer import ByteText
from tests.unit.router.conftest import FACTS
from twostroke.base.errors import ContextLengthExceeded, InvalidRequest, Overloaded, ServeError
from twostroke.request import token_bits
from twostroke.rpc.v1 import inference_pb2

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "maximum": 10**40}}}]
CHAT = {"messages": [{"role": "user", "content": "hi \ud83d\ude42"}], "stop": ["a", "é"], "logit_bias": {"5": 1.5}}
RESPONSE_TOOLS = [{"type": "custom", "name": "c"}, {"type": "function", "name": "f", "parameters": {"maximum": 10**40}}]
ALLOWED = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "custom", "name": "c"}]}
INFER = {
    "inputs": [{"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["x"]}],
    "outputs": [{"name": "text_output", "parameters": {"binary_data": True}}],
}
BODIES: list[tuple[str, Any]] = [
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", {**CHAT, "response_format": {"type": "json_object"}, "stream_options": {}, "seed": 2**60}),
    ("/v1/completions", {"prompt": ["x", [1, 2, 3]], "echo": True, "max_tokens": 3, "timeout": 2.5}),
    ("/v1/responses", {"input": "hi", "text": {"format": {"type": "text"}}, "metadata": {"a": "b"}}),
    ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5, "system": "s"}),
    ("/v1/chat/completions", {**CHAT, "allowed_token_ids": [1, 200], "logprob_token_ids": [5], "logprobs": True}),
    ("/v1/completions", {"prompt": "x", "logprobs": 0, "return_tokens_as_token_ids": True, "cache_salt": "s"}),
    ("/v1/responses", {"input": "hi", "tools": RESPONSE_TOOLS, "tool_choice": ALLOWED, "include": [{"a": [1]}]}),
    ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 0, "stop_sequences": ["x"]}),
    ("/v2/models/{model:path}/generate_stream", {"text_input": "x", "details": True, "parameters": {"n": "1"}}),
    ("/v2/models/{model:path}/infer", INFER),
    ("/v1/chat/completions", {"messages": "no list"}),
    ("/v1/completions", {"prompt": "x" * 9000}),
]


@pytest.mark.parametrize(("kind", "body"), BODIES)
def test_what_was_prepared_crosses_as_it_is(kind: str, body: Any) -> None:
    work = Work(
        kind,
        json.dumps(body).encode(),
        "toy",
        FACTS,
        frozenset({"an adapter"}),
        (("model", "toy"),),
        OutputFormats("hermes", "think"),
    )
    assert unpacked(packed(work), Work) == work
    outcome = prepare(work, ByteText())
    came = unpacked(packed(outcome), PreparationOutcome)
    assert came.tokens == outcome.tokens
    assert came.value == outcome.value
    assert type(came.value) is type(outcome.value)
    if outcome.value is not None:
        assert came.value.model_fields_set == outcome.value.model_fields_set
        assert [type(prompt.ids) for prompt in came.value.prompts] == [array] * len(outcome.value.prompts)
    if outcome.error is not None:
        assert (type(came.error), vars(came.error)) == (type(outcome.error), vars(outcome.error))
        assert str(came.error) == outcome.error.message


@pytest.mark.parametrize(
    "value",
    [
        *(None, 2**80, -(2**70), 1.5, "\ud800", b"\xff", (1, (2, [3])), {"a": [1, None]}, {(1, 2): 3}, frozenset("ab")),
        *(array("I", [1, 2**32 - 1]), array("f", [0.5]), OutputFormats("hermes", "")),
        TokenPrompt(array("I", [1]), parsing=Parsing(formats=OutputFormats(), tools={"f": {"type": "object"}})),
        (TokenPrompt(()), StructuredOutput("json", b"{}", "f")),
        StructuredOutput("json", b"{}", "f", otherwise=StructuredOutput("regex", b"a", "f")),
    ],
)
def test_values_of_every_kind_cross(value: object) -> None:
    assert unpacked(packed(value), object) == value


@pytest.mark.parametrize(
    "error",
    [
        InvalidRequest("no", field="f"),
        Overloaded("later", retry_after_s=1.5),
        ContextLengthExceeded("long", tokens=5, most_tokens=4),
    ],
)
def test_errors_cross_with_all_that_they_say(error: ServeError) -> None:
    came = unpacked(packed(Refusal("size", error) if isinstance(error, InvalidRequest) else error), object)
    came = came.error if isinstance(came, Refusal) else came
    assert (type(came), vars(came), str(came)) == (type(error), vars(error), str(error))


def test_what_a_grpc_message_allows_and_ends_with_comes_as_options_and_is_not_read_again() -> None:
    """A list of millions of tokens would hold the event loop for a second."""
    asked = inference_pb2.GenerateRequest(
        token_ids=inference_pb2.TokenIds(ids=[1]),
        sampling=inference_pb2.SamplingOptions(allowed_token_ids=[7] * 100_000, seed=3),
        stop=inference_pb2.StopOptions(stop_token_ids=[5], max_tokens=2),
        n=2,
    )
    outcome = prepare(Work("grpc_generate", asked.SerializeToString(), "toy", FACTS), ByteText())
    options = unpacked(packed(outcome), PreparationOutcome).value.options
    assert options.allowed_tokens == token_bits([7])
    assert (options.seed, list(options.stop_token_ids), options.max_tokens, options.n) == (3, [5], 2, 2)


def _object(name: str, fields: Any, given: Any = ()) -> bytes:
    return bytes(packed_ext(wire._OBJECT, [name, fields, list(given)]))


def packed_ext(code: int, value: Any) -> bytes:
    inner = value if isinstance(value, bytes) else packed(value)
    return bytes(msgpack.packb(msgpack.ExtType(code, inner)))


class _Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_a_pickle_runs_nothing(tmp_path: Path) -> None:
    with pytest.raises(BrokenMessage):
        unpacked(pickle.dumps(_Evil(tmp_path / "ran")), PreparationOutcome)
    assert not list(tmp_path.iterdir())


OUTCOME = wire._name(PreparationOutcome)
OPTIONS = wire._name(AnswerOptions)


@pytest.mark.parametrize(
    "message",
    [
        *(b"", b"\xc1", b"\x93\x01", packed([1]), packed(7), b"\xdd\xff\xff\xff\xff", b"\x91" * 5000),
        *(packed_ext(99, b""), packed_ext(wire._ARRAY, b"O12345678"), packed_ext(wire._ARRAY, b"I123")),
        *(packed_ext(wire._ERROR, ["SystemExit", {"message": "m"}]), packed_ext(wire._ERROR, ["InvalidRequest", {}])),
        packed_ext(wire._ERROR, ["InvalidRequest", {"message": "m", "field": ["f"]}]),
        *(_object("pathlib.Path", {}), _object("os.system", {"command": "true"}), _object("builtins.object", {})),
        _object(OUTCOME, {"value": None, "error": "text", "tokens": 0}),
        _object(OUTCOME, {"value": None, "error": None, "tokens": "many"}),
        _object(OUTCOME, {"value": None, "error": None}),
        _object(OUTCOME, {"value": None, "error": None, "tokens": 0, "more": 1}),
        _object(OPTIONS, dict.fromkeys(AnswerOptions.model_fields)),
    ],
)
def test_what_nobody_has_packed_is_refused_in_one_way(message: bytes) -> None:
    with pytest.raises(BrokenMessage):
        unpacked(message, PreparationOutcome)


def test_fields_of_answers_have_their_declared_types() -> None:
    body = json.dumps(CHAT).encode()
    outcome = prepare(Work("/v1/chat/completions", body, "toy", FACTS), ByteText())
    (prompt,) = outcome.value.prompts
    forged: list[dict[str, Any]] = [
        {"options": "none"},
        {"options": outcome.value.options.model_copy(update={"n": "3"})},
        {"options": outcome.value.options.model_copy(update={"stop": (1,)})},
        {"prompts": (replace(prompt, ids=["text"]),)},
        {"stream": 1},
        {"cache_salt": "text"},
    ]
    for update in forged:
        with pytest.raises(BrokenMessage, match="is of another type"):
            unpacked(packed(outcome.value.model_copy(update=update)), object)
