"""Grammars of answers with tools: what they permit is what the parsers read as calls."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from router.metrics import RouterMetrics
from router.requests.compiled_grammars import CompiledGrammars
from router.text.output.framing import ToolUse, Unmarked
from router.text.output.grammars.answers import answer_grammar, unmarked_calls
from router.text.output.output_formats import TOOL_FORMATS
from router.text.output.parsing import OutputFormats, Parsing, callable_tools
from router.text.output.parts import TextPart, ToolCallPart
from router.text.structured.fields import structured_output
from router.text.structured.output import StructuredOutput
from router.text.tokenizer import ByteText
from tests.conformance.make_tool_outputs import Call, harmony, hermes, llama3_json, mistral_list, pythonic, qwen3_coder
from tests.inline_preparer import InlinePreparer
from twostroke.base.errors import InvalidRequest, UnsupportedFeature
from twostroke.grammar.vocabulary import load_vocabulary

VOCABULARY = load_vocabulary("", 300, (299,))
WRITERS: dict[str, Callable[[Sequence[Call]], str]] = {
    "harmony": lambda calls: harmony(calls).removesuffix("<|call|>"),
    "hermes": hermes,
    "llama3_json": llama3_json,
    "mistral": mistral_list,
    "pythonic": pythonic,
    "qwen3_coder": qwen3_coder,
}
WEATHER = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "weather", "parameters": {**WEATHER, "required": ["city"]}}},
    {"type": "function", "function": {"name": "ping"}},
]
PARIS: Call = ("weather", {"city": 'Paris "{x}" <b>', "days": 3})
PING: Call = ("ping", {})
FORMATS = sorted(WRITERS)
TWO_CALLS = sorted(set(FORMATS) - {"harmony"})
"""Formats in which one answer may have two calls."""


def grammar(
    form: str,
    use: ToolUse,
    *,
    tools: list[dict[str, Any]] = TOOLS,
    reasoning: str = "",
    is_open: bool = False,
    wanted: StructuredOutput | None = None,
    added_token: Callable[[str], int | None] = lambda text: None,
) -> StructuredOutput | None:
    parsing = Parsing(formats=OutputFormats(form, reasoning), tools=callable_tools(tools), is_reasoning_open=is_open)
    return answer_grammar(tools, use, parsing, wanted, added_token)


def permits(output: StructuredOutput | None, text: str) -> bool:
    """Tells whether a whole answer matches."""
    assert output is not None
    matcher = LLMatcher(VOCABULARY.tokenizer, output.body.decode(), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    data = list(text.encode())
    return matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()


def test_every_format_has_a_grammar() -> None:
    assert {each.name for each in TOOL_FORMATS} == set(WRITERS)


@pytest.mark.parametrize("form", FORMATS)
def test_required_calls_begin_with_the_first_token(form: str) -> None:
    required, write = grammar(form, ToolUse(must_call=True)), WRITERS[form]
    assert permits(required, write([PARIS]))
    assert permits(required, write([PING]))
    assert not permits(required, "Hello.")
    assert not permits(required, "")
    assert not permits(required, write([("launch", {})]))
    assert not permits(required, write([PARIS])[:-1])


@pytest.mark.parametrize("form", FORMATS)
def test_a_named_tool_is_the_only_one(form: str) -> None:
    named, write = grammar(form, ToolUse(must_call=True, only="ping")), WRITERS[form]
    assert permits(named, write([PING]))
    assert not permits(named, write([PARIS]))


@pytest.mark.parametrize("form", FORMATS)
def test_an_answer_may_be_text_until_a_call_begins(form: str) -> None:
    auto, write = grammar(form, ToolUse(is_parallel=False)), WRITERS[form]
    text = "<|channel|>final<|message|>It rains." if form == "harmony" else "It rains {here}."
    assert permits(auto, text)
    assert permits(auto, write([PARIS]))
    assert not permits(auto, write([("launch", {})]))
    if form in ("hermes", "mistral", "qwen3_coder"):
        assert permits(auto, f"Let me see.\n{write([PARIS])}")
        assert not permits(auto, f"Let me see.\n{write([('launch', {})])}")


@pytest.mark.parametrize("form", TWO_CALLS)
def test_without_parallel_calls_there_is_one(form: str) -> None:
    for use in (ToolUse(must_call=True), ToolUse(must_call=True, is_parallel=False), ToolUse(is_parallel=False)):
        assert permits(grammar(form, use), WRITERS[form]([PARIS, PING])) == use.is_parallel


@pytest.mark.parametrize("form", FORMATS)
def test_tools_that_ask_for_nothing_cost_no_grammar(form: str) -> None:
    assert grammar(form, ToolUse()) is None


@pytest.mark.parametrize("form", ["harmony", "hermes", "llama3_json", "mistral"])
def test_arguments_of_strict_tools_keep_to_their_schema(form: str) -> None:
    tools = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}]
    strict, write = grammar(form, ToolUse(), tools=tools), WRITERS[form]
    assert permits(strict, write([PARIS]))
    assert not permits(strict, write([("weather", {"city": 5})]))
    assert not permits(strict, write([("weather", {"days": 5})]))


@pytest.mark.parametrize("form", FORMATS)
def test_a_strict_tool_that_no_grammar_keeps_to_is_refused_by_name(form: str) -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string", "not": {"const": "x"}}}}
    tools = [{"type": "function", "function": {"name": "weather", "parameters": schema, "strict": True}}]
    with pytest.raises(UnsupportedFeature, match="not") as refusal:
        grammar(form, ToolUse(), tools=tools)
    assert (refusal.value.field or "").startswith("tools[0].function")
    tools[0]["function"]["strict"] = False
    assert permits(grammar(form, ToolUse(must_call=True), tools=tools), WRITERS[form]([("weather", {"city": "y"})]))


@pytest.mark.parametrize("form", ["hermes", "qwen3_coder", "harmony"])
@pytest.mark.parametrize(
    "schema",
    [
        {"oneOf": [{"type": "object"}, {"type": "object", "properties": {"a": {}}}]},
        {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "string", "pattern": "^(?!x)"}}}},
    ],
)
async def test_a_schema_that_only_the_compiler_refuses_binds_strict_tools_alone(
    form: str, schema: dict[str, Any]
) -> None:
    """Servers of MCP describe their tools so; clients that want one call at a time would get 400 for all requests."""
    grammars = CompiledGrammars(InlinePreparer(ByteText()), RouterMetrics())
    function: dict[str, Any] = {"name": "weather", "parameters": schema}
    tools = [{"type": "function", "function": function}, *TOOLS[1:]]
    wanted = grammar(form, ToolUse(is_parallel=False), tools=tools)
    assert wanted is not None
    taken = await grammars.compiled(wanted, "")
    call = WRITERS[form]([("weather", {"a": ["x"]})])
    assert permits(StructuredOutput("llguidance", taken.grammar.source.encode(), "tools"), call)
    assert await grammars.compiled(wanted, "") is taken
    function["strict"] = True

    async def compile_strict() -> None:
        strict = grammar(form, ToolUse(is_parallel=False), tools=tools)
        assert strict is not None
        await grammars.compiled(strict, "")

    with pytest.raises(InvalidRequest):
        await compile_strict()


@pytest.mark.parametrize("is_strict", [True, False])
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(
    "schema",
    [
        {"properties": [1]},
        {"properties": "abc"},
        {"properties": {"a": {}}, "required": 5},
        {"properties": {"a": {"format": [1]}}},
        {"properties": {"a": {"format": {}}}},
    ],
)
def test_a_schema_of_arguments_that_is_none_is_the_clients_mistake(
    form: str, schema: dict[str, Any], is_strict: bool
) -> None:
    tools = [{"type": "function", "function": {"name": "weather", "parameters": schema, "strict": is_strict}}]
    with contextlib.suppress(InvalidRequest):
        assert grammar(form, ToolUse(must_call=True), tools=tools) is not None


@pytest.mark.parametrize(
    "schema",
    [
        {"oneOf": [{"required": ["a"]}, {"required": ["b"]}], "properties": {"a": {}, "b": {}}},
        {"allOf": [{"properties": {"a": {"type": "integer"}}}]},
        {"$ref": "#/$defs/arguments", "$defs": {"arguments": {"type": "object"}}},
        {"additionalProperties": {"type": "integer"}},
    ],
)
def test_what_qwen3_coders_calls_cannot_be_kept_to_is_refused_for_strict_tools(schema: dict[str, Any]) -> None:
    function = {"name": "weather", "parameters": schema, "strict": True}
    with pytest.raises(UnsupportedFeature, match="cannot be kept to in this model's format of calls"):
        grammar("qwen3_coder", ToolUse(), tools=[{"type": "function", "function": function}])
    function["strict"] = False
    tools = [{"type": "function", "function": function}]
    assert grammar("qwen3_coder", ToolUse(must_call=True), tools=tools) is not None


def test_values_of_qwen3_coders_parameters_keep_to_their_schemas() -> None:
    tools = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}]
    strict = grammar("qwen3_coder", ToolUse(), tools=tools)
    assert permits(strict, qwen3_coder([PARIS]))
    assert not permits(strict, qwen3_coder([("weather", {"city": "x", "days": "three"})]))
    assert not permits(strict, qwen3_coder([("weather", {"days": 3})]))


@pytest.mark.parametrize("form", TWO_CALLS)
def test_reasoning_comes_before_what_is_required(form: str) -> None:
    calls = WRITERS[form]([PARIS])
    for is_open, thought in ((False, "<think>\nHm {.\n</think>\n\n"), (True, "Hm.\n</think>\n\n")):
        required = grammar(form, ToolUse(must_call=True), reasoning="think", is_open=is_open)
        assert permits(required, thought + calls)
        assert not permits(required, f"{thought}Hello.")
        assert permits(required, calls) == (not is_open)


def test_harmony_reasons_before_it_calls() -> None:
    required = grammar("harmony", ToolUse(must_call=True), reasoning="harmony")
    thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    assert permits(required, thought + WRITERS["harmony"]([PARIS]))
    assert not permits(required, f"{thought}<|channel|>final<|message|>No.")


@pytest.mark.parametrize("form", TWO_CALLS)
def test_with_a_schema_an_answer_is_calls_or_what_the_schema_says(form: str) -> None:
    schema = {"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"]}
    wanted = structured_output({"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}})
    if form == "llama3_json":
        with pytest.raises(UnsupportedFeature, match="look like other JSON"):
            grammar(form, ToolUse(), wanted=wanted)
        return
    auto = grammar(form, ToolUse(), wanted=wanted)
    assert permits(auto, '{"sum": 3}')
    assert permits(auto, WRITERS[form]([PARIS]))
    assert not permits(auto, "Hello.")
    assert not permits(grammar(form, ToolUse(must_call=True), wanted=wanted), '{"sum": 3}')
    with pytest.raises(UnsupportedFeature, match=r"structured_outputs\.regex"):
        grammar(form, ToolUse(), wanted=structured_output({"structured_outputs": {"regex": "a+"}}))


def test_a_schema_beside_tools_is_read_as_without_them() -> None:
    compact = structured_output({"structured_outputs": {"json": {"type": "object"}, "disable_any_whitespace": True}})
    auto = grammar("hermes", ToolUse(), wanted=compact)
    assert permits(auto, '{"a":1}')
    assert not permits(auto, '{"a": 1}')
    for text, said in (
        ("{", "is not valid JSON"),
        ("[]", "must be a JSON object"),
        ('{"items":' * 5000 + "{}" + "}" * 5000, "is nested too deeply"),
    ):
        with pytest.raises(InvalidRequest, match=rf"structured_outputs\.json {said}"):
            grammar("hermes", ToolUse(), wanted=structured_output({"structured_outputs": {"json": text}}))


@pytest.mark.parametrize("form", FORMATS)
def test_what_a_grammar_permits_is_read_as_calls(form: str) -> None:
    parsing = Parsing(formats=OutputFormats(form), tools=callable_tools(TOOLS))
    parser = parsing.parser("stream", 0)
    output = WRITERS[form]([PARIS])
    assert permits(grammar(form, ToolUse(must_call=True)), output)
    parts = [*parser.feed(output), *parser.flush()]
    assert parser.has_calls
    assert not any(isinstance(part, TextPart) for part in parts)


@pytest.mark.parametrize("required", [[], ["a"], ["b"], ["c"], ["a", "c"], ["a", "b", "c"]])
def test_a_pythonic_call_has_what_is_required_and_nothing_twice(required: list[str]) -> None:
    """A small model that may write a parameter again does so without end."""
    schema = {"type": "object", "properties": {key: {"type": "string"} for key in "abc"}, "required": required}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    called = grammar("pythonic", ToolUse(must_call=True), tools=tools)
    for names in [[], *(list(names) for count in (1, 2, 3) for names in product("abc", repeat=count))]:
        is_in_order = names == sorted(set(names))
        call = f"[f({', '.join(f'{name}=1' for name in names)})]"
        assert permits(called, call) == (is_in_order and set(required) <= set(names)), call


def test_a_mark_that_is_a_token_may_be_spelled_and_a_spelled_call_is_kept_to_the_same_grammar(tmp_path: Path) -> None:
    """A model that never learned the tokens spells them, and parsers see text alone."""
    marks = ("<tool_call>", "</tool_call>")
    tokenizer = tokenizer_with(marks)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    vocabulary = load_vocabulary(str(tmp_path), tokenizer.get_vocab_size(), (tokenizer.token_to_id("<end>"),))

    def is_permitted(output: StructuredOutput | None, text: str, *, is_spelled: bool) -> bool:
        assert output is not None
        matcher = LLMatcher(vocabulary.tokenizer, output.body.decode(), log_level=0)
        pieces = text if is_spelled else [text]
        ids = [token for piece in pieces for token in tokenizer.encode(piece).ids]
        assert is_spelled != (tokenizer.token_to_id(marks[0]) in ids)
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    tools = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}]
    for use in (ToolUse(must_call=True), ToolUse()):
        strict = grammar("hermes", use, tools=tools, added_token=tokenizer.token_to_id)
        for is_spelled in (False, True):
            assert is_permitted(strict, hermes([PARIS, PARIS]), is_spelled=is_spelled)
            assert not is_permitted(strict, hermes([("weather", {"city": 5})]), is_spelled=is_spelled)
            assert not is_permitted(strict, hermes([PARIS, ("ping", {})]), is_spelled=is_spelled)


def tokenizer_with(added: Sequence[str]) -> Tokenizer:
    """Returns a tokenizer of single bytes and some added tokens that are not special, as those of Qwen2.5 are."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: rank for rank, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<end>", special=True)])
    tokenizer.add_tokens([AddedToken(text, special=False) for text in added])
    return tokenizer


UNMARKED = '{"name": "weather", "arguments": {"city": "Paris"}}'


@pytest.mark.parametrize("use", [ToolUse(), ToolUse(is_parallel=False)])
def test_a_call_without_its_mark_keeps_to_the_same_grammar(use: ToolUse) -> None:
    """Strict tools and single calls are promised for whatever the parser reads as a call."""
    tools = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}, TOOLS[1]]
    auto = grammar("hermes", use, tools=tools)
    for output in (
        UNMARKED,
        f"```json\n{UNMARKED}\n```",
        f"Let me see.\n\n{UNMARKED}",
        '{\n  "name": "weather",\n  "parameters": {\n    "city": "x"\n  }\n}',
        f"{{{UNMARKED}}}",
        "It rains {here}.",
        '{"name": "launch", "arguments": 5}',
    ):
        assert permits(auto, output), output
        wrong = output.replace('"city"', '"days"')
        assert permits(auto, wrong) == (wrong == output), wrong
        assert read_calls(output, use, tools) == (1 if '"city"' in output else 0), output
    for blanks in (32, 33):
        assert permits(auto, f"{UNMARKED[:-1]}{blanks * ' '}}}") == (blanks == 32)
    two = f"{UNMARKED}\n{UNMARKED}"
    assert permits(auto, two) == use.is_parallel
    assert permits(auto, f"{UNMARKED}\n{hermes([PARIS])}") == use.is_parallel


@pytest.mark.parametrize(
    "output",
    [
        UNMARKED.replace('"name"', '"n\\u0061me"'),
        UNMARKED.replace('"weather"', '"we\\u0061ther"'),
        '{"arguments": {"days": 3}, "name": "weather"}',
        '{"type": "function", "name": "weather", "arguments": {"days": 3}}',
        '{"name": "weather", "arguments": "{\\"days\\": 3}"}',
        '{"name": "weather", "arguments": null}',
        '{"name": "weather", "id": "x", "arguments": {"days": 3}}',
    ],
)
def test_what_the_grammar_does_not_find_is_no_call_where_it_binds_calls(output: str) -> None:
    tools = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}]
    assert read_calls(output, ToolUse(), tools) == 0
    assert read_calls(output, ToolUse(), TOOLS) == 1


def test_an_object_that_a_schema_asks_for_is_no_call() -> None:
    wanted = structured_output({"response_format": {"type": "json_object"}})
    assert unmarked_calls(TOOLS, ToolUse(), wanted) is Unmarked.NONE
    assert unmarked_calls(TOOLS, ToolUse(must_call=True), None) is Unmarked.NONE
    assert unmarked_calls(TOOLS * 17, ToolUse(is_parallel=False), None) is Unmarked.NONE, (
        "a grammar of them all is slow"
    )


def read_calls(output: str, use: ToolUse, tools: list[dict[str, Any]]) -> int:
    unmarked = unmarked_calls(tools, use, None)
    parsing = Parsing(formats=OutputFormats("hermes"), tools=callable_tools(tools), unmarked=unmarked)
    parser = parsing.parser("stream", 0)
    return sum(isinstance(part, ToolCallPart) and bool(part.name) for part in [*parser.feed(output), *parser.flush()])
