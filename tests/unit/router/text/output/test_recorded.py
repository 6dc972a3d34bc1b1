"""Answers of real models: a second reading finds the calls that are recorded."""

from __future__ import annotations

import json
import re
from typing import Any

from tests.conformance.make_tool_outputs import TOOLS
from tests.conformance.record_outputs import recorded_lines

LINES = recorded_lines()


def test_there_are_answers_of_more_than_one_model_in_every_format_with_and_without_calls() -> None:
    assert len(LINES) >= 60
    assert len({line["model"] for line in LINES}) > 1
    for form in ("hermes", "qwen3_coder", "llama3_json", "pythonic", "mistral", "harmony"):
        of_form = [line for line in LINES if line["format"] == form]
        has_calls = {any(part[0] == "call" for part in line["parts"]) for line in of_form}
        assert has_calls == {True, False}, form


def test_whole_calls_are_those_that_a_second_reading_finds() -> None:
    """It reads blocks of JSON between marks, which is all that a well-formed call of this format is."""
    found = 0
    for line in LINES:
        if line["format"] != "hermes":
            continue
        blocks = re.findall(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", line["output"], re.DOTALL)
        expected = [call for block in blocks if (call := _read(block)) is not None]
        recorded = [(part[1], _value(part[2])) for part in line["parts"] if part[0] == "call"]
        rest = iter(recorded)
        assert all(call in rest for call in expected), line["output"]  # in this order, with broken ones between them
        marked = line["output"].count("<tool_call>") - _not_calls(line["output"])
        assert len(recorded) == marked + _without_mark(line["output"])
        found += len(expected)
    assert found >= 20


def _read(block: str) -> tuple[str, Any] | None:
    call = _value(block)
    is_call = isinstance(call, dict) and set(call) == {"name", "arguments"} and isinstance(call["arguments"], dict)
    return (call["name"], call["arguments"]) if is_call and call["name"] in TOOLS else None


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _not_calls(output: str) -> int:
    """Returns how many marks no object with the name of a tool and with arguments follows."""
    names = "|".join(TOOLS)
    begun = rf'<tool_call>\s*\{{\s*"name"\s*:\s*"(?:{names})"\s*(?:\}}|,\s*"(?:arguments|parameters)"\s*:\s*\{{)'
    return output.count("<tool_call>") - len(re.findall(begun, output))


def _without_mark(output: str) -> int:
    """Returns how many objects with the name of a tool and with arguments begin a line, and follow no mark."""
    names = "|".join(TOOLS)
    begun = rf'^\{{+\s*"name"\s*:\s*"(?:{names})"\s*,\s*"(?:arguments|parameters)"\s*:\s*\{{'
    return len(re.findall(begun, re.sub(r"<tool_call>\s*", "<tool_call>", output), re.MULTILINE))
