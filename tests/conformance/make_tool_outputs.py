"""Writes tool_outputs.jsonl: answers of models with tool calls and reasoning, and the parts that they mean.

python -m tests.conformance.make_tool_outputs

A line is {"format", "output", "parts"}. `parts` are ["text", text], ["reasoning", text] and ["call", name, arguments].
The expected parts come from what the answers are composed of, not from a parser. hand_written.jsonl has lines of the
same form for answers that break off, are framed badly or call nothing: they mean what the rules of docs/tools.md say.
The format `open_think` is that of `think` behind a prompt that ends with the opening mark.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("tool_outputs.jsonl")
HAND_WRITTEN = Path(__file__).with_name("hand_written.jsonl")

Arguments = Mapping[str, Any]
Call = tuple[str, Arguments]
Parts = list[list[str]]


def _schema(**types: str) -> Mapping[str, Any]:
    return {"type": "object", "properties": {name: {"type": kind} for name, kind in types.items()}}


TOOLS: Mapping[str, Mapping[str, Any]] = {
    "get_weather": _schema(city="string", unit="string", days="integer", now="boolean"),
    "calculate": _schema(expression="string"),
    "search": _schema(query="string", limit="integer", safe="boolean", filters="object"),
    "write_file": _schema(path="string", content="string"),
    "ping": {},
}
"""Names of the tools that every answer may call, each with the schema of its arguments."""

CALLS: Sequence[Call] = (
    ("get_weather", {"city": "Paris", "unit": "celsius"}),
    ("get_weather", {"city": "São Paulo 🌧", "days": 3}),
    ("calculate", {"expression": "(3 + 4) * {x} - \"y\" / '2'"}),
    ("search", {"query": 'a </tool_call> b <tool_call> {"name": "ping"}', "limit": 10, "safe": True}),
    ("write_file", {"path": "C:\\new\\table.txt", "content": "line one\n\tline two\n\n}]{[\n"}),
    ("search", {"query": "", "filters": {"tags": ["a", "b, c"], "range": [1, -2.5, 1e-3], "none": None}}),
    ("ping", {}),
)
TEXTS = ("", "I will look that up.", "Let me check {both} of [these] <b>first</b>:\n\n1. one", "C'est l'été — 好的。")


def hermes(calls: Sequence[Call]) -> str:
    said = [{"name": name, "arguments": arguments} for name, arguments in calls]
    return "\n".join(f"<tool_call>\n{_json(call)}\n</tool_call>" for call in said)


def llama3_json(calls: Sequence[Call]) -> str:
    return "; ".join(_json({"name": name, "parameters": arguments}) for name, arguments in calls)


def tagged_llama3_json(calls: Sequence[Call]) -> str:
    return f"<|python_tag|>{llama3_json(calls)}"


def mistral_list(calls: Sequence[Call]) -> str:
    return f"[TOOL_CALLS] {_json([{'name': name, 'arguments': arguments} for name, arguments in calls])}"


def mistral_names(calls: Sequence[Call]) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{_json(arguments)}" for name, arguments in calls)


def qwen3_coder(calls: Sequence[Call]) -> str:
    return "\n".join(_qwen3_coder(name, arguments) for name, arguments in calls)


def _qwen3_coder(name: str, arguments: Arguments) -> str:
    said = "".join(
        f"<parameter={key}>\n{value if isinstance(value, str) else _json(value)}\n</parameter>\n"
        for key, value in arguments.items()
    )
    return f"<tool_call>\n<function={name}>\n{said}</function>\n</tool_call>"


def pythonic(calls: Sequence[Call]) -> str:
    said = (f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})" for name, arguments in calls)
    return f"[{', '.join(said)}]"


def harmony(calls: Sequence[Call]) -> str:
    messages = (
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{_json(arguments)}<|call|>"
        for name, arguments in calls
    )
    return "<|start|>assistant".join(messages)


WRITERS: Sequence[tuple[str, Callable[[Sequence[Call]], str], bool, bool]] = (
    ("hermes", hermes, True, True),
    ("llama3_json", llama3_json, False, False),
    ("llama3_json", tagged_llama3_json, True, False),
    ("mistral", mistral_list, True, False),
    ("mistral", mistral_names, True, False),
    ("qwen3_coder", qwen3_coder, True, True),
    ("pythonic", pythonic, False, False),
)
"""Format, writer of calls, whether text may stand before calls, whether text may stand behind them."""


def composed() -> Iterator[tuple[str, str, Parts]]:
    for kind, write, takes_before, takes_behind in WRITERS:
        for rank, call in enumerate(CALLS):
            before = TEXTS[rank % len(TEXTS)] if takes_before else ""
            yield _answer(kind, write, before, [call], TEXTS[(rank + 2) % len(TEXTS)] if takes_behind else "")
        for first in range(len(CALLS)):
            calls = [CALLS[first], CALLS[(first + 3) % len(CALLS)]]
            before = TEXTS[(first + 1) % len(TEXTS)] if takes_before else ""
            yield _answer(kind, write, before, calls, "")
        yield _answer(kind, write, "", CALLS[:3], "")
        yield _answer(kind, write, TEXTS[2], [], "")
    yield from _composed_harmony()


def _answer(
    kind: str, write: Callable[[Sequence[Call]], str], before: str, calls: Sequence[Call], behind: str
) -> tuple[str, str, Parts]:
    said = write(calls) if calls else ""
    output = "\n".join(piece for piece in (before, said, behind) if piece)
    texts = [[["text", text]] if text else [] for text in (before, behind)]
    return kind, output, [*texts[0], *_expected(calls), *texts[1]]


def _composed_harmony() -> Iterator[tuple[str, str, Parts]]:
    for rank, call in enumerate(CALLS):
        thought = TEXTS[rank % len(TEXTS)] + "\nNeed a tool."
        thinks = f"<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant"
        yield "harmony", thinks + harmony([call]), [["reasoning", thought], *_expected([call])]
        pair = [call, CALLS[(rank + 1) % len(CALLS)]]
        says = f"<|channel|>commentary<|message|>{thought}<|end|><|start|>assistant"
        yield "harmony", says + harmony(pair), [["text", thought], *_expected(pair)]
        final = f"<|channel|>final<|message|>{thought}<|return|>"
        yield "harmony", thinks + final, [["reasoning", thought], ["text", thought]]


def _expected(calls: Sequence[Call]) -> Parts:
    return [["call", name, _json(arguments)] for name, arguments in calls]


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def lines() -> list[dict[str, Any]]:
    return [{"format": kind, "output": output, "parts": parts} for kind, output, parts in composed()]


def main() -> None:
    FILE.write_text("".join(_json(line) + "\n" for line in lines()))
    print(f"{len(lines())} answers in {FILE.name}")


if __name__ == "__main__":
    main()
