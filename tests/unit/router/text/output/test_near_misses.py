"""Answers that nearly keep to a format, as models write them: what is a call in them, and with which arguments."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from router.text.output.framing import Unmarked
from router.text.output.output_formats import TOOL_FORMATS, TOOLS_BY_NAME
from router.text.output.parts import Part
from tests.conformance.make_tool_outputs import (
    TOOLS,
    Call,
    harmony,
    hermes,
    llama3_json,
    mistral_list,
    mistral_names,
    pythonic,
    qwen3_coder,
)
from tests.conformance.reading import joined
from tests.unit.router.text.output.test_conformance import RECORDED, hostile

FORMATS = [each.name for each in TOOL_FORMATS]
PARIS: Call = ("get_weather", {"city": "Paris", "days": 3})
PING: Call = ("ping", {})
SEARCH: Call = ("search", {"query": "a b", "limit": 5})
WRITERS: Mapping[str, Sequence[Callable[[Sequence[Call]], str]]] = {
    "harmony": (harmony,),
    "hermes": (hermes,),
    "llama3_json": (llama3_json,),
    "mistral": (mistral_list, mistral_names),
    "pythonic": (pythonic,),
    "qwen3_coder": (qwen3_coder,),
}


def read(
    kind: str, pieces: Sequence[str], *, is_cut: bool = False, tools: Mapping[str, Any] = TOOLS
) -> list[list[str]]:
    parser = TOOLS_BY_NAME[kind].parser(tools, lambda rank: f"call_{rank}")
    parts = [part for piece in pieces for part in parser.feed(piece)]
    return joined([*parts, *parser.flush(is_cut=is_cut)])


def calls_in(parts: Sequence[Sequence[str]]) -> list[Call]:
    """Returns the calls; each has an object as its arguments."""
    calls = [(part[1], json.loads(part[2])) for part in parts if part[0] == "call"]
    assert all(isinstance(arguments, dict) for _, arguments in calls)
    return calls


def in_pieces(draw: random.Random, text: str) -> Iterator[str]:
    cuts = sorted(draw.choices(range(len(text) + 1), k=5))
    return (text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True))


@dataclass(frozen=True)
class Miss:
    kind: str
    output: str
    calls: Sequence[Call]
    text: str = ""
    """All that is no call."""


def _call_object(name: str, **entries: Any) -> str:
    return json.dumps({"name": name, **entries})


def _with_objects() -> Iterator[Miss]:
    """Yields what formats that write calls as objects have in common."""
    frames = {
        "hermes": "<tool_call>\n{}\n</tool_call>",
        "llama3_json": "{}",
        "mistral": "[TOOL_CALLS] [{}]",
    }
    city = {"city": "Paris"}
    for kind, frame in frames.items():
        for said in (
            _call_object("get_weather", arguments=city),
            _call_object("get_weather", parameters=city),
            _call_object("get_weather", arguments=json.dumps(city)),
            _call_object("get_weather", arguments=f" \n{json.dumps(city, indent=1)}\n "),
            json.dumps({"arguments": json.dumps(city), "name": "get_weather"}),
            json.dumps({"arguments": city, "name": "get_weather"}, indent=4),
            _call_object("get_weather", id="x", type="function", arguments=city),
            '{"name": "get_weather", "arguments": {"city": "Paris",}}',
            '{{"name": "get_weather", "arguments": {"city": "Paris"}}}',
        ):
            yield Miss(kind, frame.replace("{}", said), [("get_weather", city)])
        for said in (
            _call_object("ping"),
            _call_object("ping", arguments=None),
            _call_object("ping", parameters=None),
            _call_object("ping", arguments=""),
            _call_object("ping", arguments="{}"),
            json.dumps({"arguments": None, "name": "ping"}),
        ):
            yield Miss(kind, frame.replace("{}", said), [PING])


HERMES = _call_object("get_weather", arguments={"city": "Paris"})
CITY: Call = ("get_weather", {"city": "Paris"})
OPEN = "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n"
INSIDE = "<a>x</parameter> </a>\n</function>\n<b>"
FUNCTION = "</function>\n</tool_call>"
MESSAGE = "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
MISSES = (
    *_with_objects(),
    Miss("hermes", f"<tool_call>\n{HERMES[:-1]}\n</tool_call>", [CITY]),
    Miss("hermes", f"<tool_call>\n{HERMES[:-2]}\n</tool_call>\nSoon.", [CITY], "Soon."),
    Miss("hermes", f"<tool_call>\n{HERMES}\n{HERMES}\n</tool_call>", [CITY, CITY]),
    Miss("hermes", f"<tool_call>\n[{HERMES}, {HERMES}]\n</tool_call>", [CITY, CITY]),
    Miss("hermes", f"<tool_call>\n```json\n{HERMES}\n```\n</tool_call>", [CITY]),
    Miss("hermes", f"<tool_call>\n{HERMES}\n<tool_call>\n{HERMES}", [CITY, CITY]),
    Miss("hermes", f"{HERMES}\n</tool_call>\nSoon.", [CITY], "Soon."),
    Miss("hermes", HERMES, [CITY]),
    Miss("hermes", f"\n  {HERMES}\n", [CITY]),
    Miss("hermes", f"{HERMES}\n{HERMES}", [CITY, CITY]),
    Miss("hermes", f"[{HERMES},\n {HERMES}]", [CITY, CITY]),
    Miss("hermes", f"I will look.\n\n{HERMES}\nWait.", [CITY], "I will look.Wait."),
    Miss("hermes", f"```json\n{HERMES}\n```", [CITY]),
    Miss("hermes", f"```\n{HERMES}\n```\n\n```JSON\n[{HERMES}]\n```\nWait.", [CITY, CITY], "Wait."),
    Miss("hermes", f"I will look:\n```json\n{HERMES}\n{HERMES}\n```", [CITY, CITY], "I will look:"),
    Miss("hermes", f"```json\n{HERMES[:-2]}", [CITY]),
    Miss("hermes", f"```json\r\n{HERMES}\r\n```\r\nWait.", [CITY], "Wait."),
    Miss("hermes", f"```xml\n<tool_call>\n{HERMES}\n</tool_call>\n```", [CITY]),
    Miss("hermes", f"```\n{2 * f'<tool_call>{HERMES}</tool_call> '}\n```\nWait.", [CITY, CITY], "Wait."),
    Miss("hermes", f"{HERMES}, {HERMES};{HERMES}", [CITY, CITY, CITY]),
    Miss("hermes", f"{HERMES}, and that is all; {{}}", [CITY], ", and that is all; {}"),
    Miss("hermes", f"```xml\n<tool_call>\n{HERMES}\n</tool_c", [CITY]),
    *(
        Miss("hermes", output.format(tag=tag, call=HERMES), [CITY], text)
        for tag in ("function_call", "tool", "tools", "response", "json", "JSON", "xml")
        for output, text in (
            ("<{tag}>\n{call}\n</{tag}>", ""),
            ("I look: <{tag}>{call}</{tag}> Wait.", "I look:Wait."),
            ("```json\n\n    <{tag}> {call} \n    </{tag}> \n``` ", ""),
            ("<{tag}>{call}", ""),
        )
    ),
    Miss("hermes", f"```xml\n<tool_call>\n{HERMES}\n```\nWait.", [CITY], "Wait."),
    Miss("hermes", json.dumps(json.loads(HERMES), indent=2), [CITY]),
    Miss("qwen3_coder", f"{OPEN}{FUNCTION}", [CITY]),
    Miss("qwen3_coder", f"{OPEN}<parameter=days>\n3\n</parameter>\n{FUNCTION}", [PARIS]),
    Miss("qwen3_coder", f"{OPEN}</parameter>\n</tool_call>\nSoon.", [CITY], "Soon."),
    Miss("qwen3_coder", f"{OPEN}</tool_call>\nSoon.", [CITY], "Soon."),
    Miss("qwen3_coder", f"{OPEN}</parameter>\n\nSoon.", [CITY], "Soon."),
    Miss("qwen3_coder", OPEN, [CITY]),
    Miss("qwen3_coder", f"{OPEN}</parameter>\n{OPEN}{FUNCTION}", [CITY, CITY]),
    Miss("qwen3_coder", f"{OPEN}</function>\n{OPEN}</function>", [CITY, CITY]),
    Miss("qwen3_coder", f"{OPEN}</tool_call>\n{OPEN}</tool_call>", [CITY, CITY]),
    Miss("qwen3_coder", "<function=get_weather><parameter=city>Paris</parameter></function>Soon.", [CITY], "Soon."),
    Miss("qwen3_coder", f"{OPEN}</parameter>\n<parameter=city>\nRome\n</parameter>\n{FUNCTION}", [
        ("get_weather", {"city": "Rome"}),
    ]),
    Miss("qwen3_coder", f"{OPEN}</parameter> is no end\n</parameter>\n{FUNCTION}", [
        ("get_weather", {"city": "Paris"}),
    ], "is no end\n</parameter>\n</function>"),
    Miss("qwen3_coder", f"<function=write_file>\n<parameter=content>\n{INSIDE}\n</parameter>\n{FUNCTION}", [
        ("write_file", {"content": INSIDE}),
    ]),
    Miss("qwen3_coder", "<function=get_weather\n<parameter=city\nParis\n</parameter>\n</function>", [CITY]),
    Miss("qwen3_coder", '<function="get_weather">\n<parameter="city">\nParis\n</parameter>\n</function>', [CITY]),
    Miss("llama3_json", _call_object("get_weather", parameters={"city": "Paris"})[:-2], [CITY]),
    Miss("llama3_json", f"{HERMES}\n{HERMES}", [CITY, CITY]),
    Miss("llama3_json", f"<|python_tag|>{HERMES}; Soon.", [CITY], "; Soon."),
    Miss("mistral", f"[TOOL_CALLS] {HERMES}", [CITY]),
    Miss("mistral", f"[TOOL_CALLS][{HERMES}", [CITY]),
    Miss("mistral", f"[TOOL_CALLS] [{HERMES[:-2]}", [CITY]),
    Miss("mistral", '[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"', [CITY]),
    Miss("mistral", '[TOOL_CALLS] get_weather [ARGS] {"city": "Paris"}\nSoon.', [CITY], "Soon."),
    Miss("mistral", '[TOOL_CALLS]get_weather {"city": "Paris"}', [CITY]),
    Miss("mistral", f"[TOOL_CALLS]get_weather[ARGS]{json.dumps(json.dumps({'city': 'Paris'}))}", [CITY]),
    Miss("mistral", "[TOOL_CALLS]ping[ARGS]null", [PING]),
    Miss("pythonic", "[get_weather(city='Paris'", [CITY]),
    Miss("pythonic", "[get_weather(city='Paris", [CITY]),
    Miss("pythonic", "[get_weather(city='Paris')\nSoon.", [CITY], "Soon."),
    Miss("pythonic", "[get_weather(city='Paris')]\n[ping()]", [CITY, PING]),
    Miss("pythonic", "[get_weather(city='Paris'), ping(", [CITY], ", ping("),
    Miss("harmony", f"{MESSAGE}{{\"city\": \"Paris\"", [CITY]),
    Miss("harmony", f"{MESSAGE}{{\"city\": \"Paris\"<|call|>", [CITY]),
    Miss("harmony", f"{MESSAGE}{{\"city\": \"Paris\"}}}}<|call|>", [CITY], "}"),
    Miss("harmony", MESSAGE + json.dumps(json.dumps({"city": "Paris"})), [CITY]),
    Miss("harmony", MESSAGE.replace("get_weather", "ping") + "<|call|>", [PING]),
    Miss("harmony", MESSAGE.replace("get_weather", "ping") + "null<|call|>", [PING]),
    Miss("harmony", f"{MESSAGE}In Paris.<|call|>", [], "to=functions.get_weather In Paris."),
)  # fmt: skip


@pytest.mark.parametrize("kind", FORMATS)
def test_a_near_miss_is_the_call_that_the_model_meant(kind: str) -> None:
    for miss in MISSES:
        if miss.kind == kind:
            parts = read(kind, [miss.output])
            assert calls_in(parts) == list(miss.calls), miss.output
            assert "".join(part[1] for part in parts if part[0] == "text").strip() == miss.text, miss.output


@pytest.mark.parametrize("kind", FORMATS)
def test_a_near_miss_means_the_same_in_any_pieces(kind: str) -> None:
    draw = random.Random(kind)
    for miss in MISSES:
        if miss.kind == kind:
            whole = read(kind, [miss.output])
            assert read(kind, list(miss.output)) == whole, miss.output
            for _ in range(20):
                pieces = list(in_pieces(draw, miss.output))
                assert read(kind, pieces) == whole, pieces


@pytest.mark.parametrize("kind", FORMATS)
def test_an_answer_that_ends_anywhere_has_objects_as_arguments(kind: str) -> None:
    draw = random.Random(kind)
    outputs = [miss.output for miss in MISSES if miss.kind == kind]
    outputs += [write([PARIS, SEARCH]) for write in WRITERS[kind]]
    outputs += [line["output"] for line in RECORDED if line["format"] == kind and len(line["output"]) < 2_000]
    outputs += [hostile(random.Random(f"ends {kind} {seed}"), kind) for seed in range(200)]
    for output in outputs:
        for end in {len(output), *draw.choices(range(len(output) + 1), k=12)}:
            calls_in(read(kind, [output[:end]]))


@pytest.mark.parametrize("kind", FORMATS)
def test_arguments_are_incomplete_where_the_answer_was_cut_in_them(kind: str) -> None:
    """A client must not act on half a text that it takes for all of it."""
    for write in WRITERS[kind]:
        output = write([PARIS])
        cut = output[: output.index("Paris") + 3]
        parts = read(kind, [cut], is_cut=True)
        assert parts == [["call", "get_weather", '{"city": "Par']]


@pytest.mark.parametrize("kind", FORMATS)
def test_unknown_names_and_prose_make_no_calls(kind: str) -> None:
    for write in WRITERS[kind]:
        assert calls_in(read(kind, [write([("launch", {"city": "Paris"})])])) == []
    for text in PROSE if kind == "llama3_json" else (*PROSE, *NAMES_ALONE):
        assert read(kind, [text]) == [["text", text]], text


EXAMPLE = HERMES.replace("Paris", "Rome")
PROSE = (
    f"A call looks like {EXAMPLE}.",
    f"- {EXAMPLE}\n- `{EXAMPLE}`\n> {EXAMPLE}",
    f"Indented:\n\n    {EXAMPLE}\n",
    f"```python\ncall = 1\n{EXAMPLE}\n```\nOr in a line: ```{EXAMPLE}```",
    '{"name": "Paris", "arguments": {"city": 1}}',
    '{"name": "get_weather", "score": 0.5}',
    '{"name": "get_weather", "description": "The weather.", "parameters": {"type": "object", "properties": {}}}',
    '{"city": "Paris", "tool": {"name": "get_weather", "arguments": {}}}',
    '```json\n{"name": "Paris", "arguments": {}}\n```\nThat is a city.',
    "[1, 2, 3]\n[link](https://example.org)\n[{}]\n{}",
    "<json>[1]</json> <tools>none</tools> <xml><response>{}</response></xml>",
    "```xml\n<tool_list>a</tool_list>\n<p>b</p>\n```",
    "`get_weather` takes a city.\n``code``\n```\nblock\n```\nThe end.",
    '"name": "get_weather", "arguments": {"city": "Paris"}',
)
"""Texts that speak of calls and of objects, and call nothing."""
NAMES_ALONE = ('{"name": "get_weather"}', '```json\n{"name": "get_weather"}\n```')
"""Objects with a name alone. An answer in the format of Llama that is one calls the tool."""


def test_a_closing_mark_behind_the_one_that_closed_the_call_is_text() -> None:
    _, text = read("hermes", [f"{hermes([PARIS])}\nA call ends with </tool_call>, as this one did."])
    assert text == ["text", "A call ends with </tool_call>, as this one did."]


def test_an_object_without_its_mark_is_no_call_where_a_schema_asks_for_objects() -> None:
    parser = TOOLS_BY_NAME["hermes"].parser(TOOLS, str, unmarked=Unmarked.NONE)
    parts: list[Part] = parser.feed(f"{HERMES}\n<tool_call>\n{HERMES}\n</tool_call>")
    assert joined_texts(parts) == HERMES
    assert parser.has_calls


def joined_texts(parts: Sequence[Part]) -> str:
    return "".join(part[0] for part in parts if len(part) == 1)
