"""Tools and their choice in the form of chat completions; tools of OpenAI's own servers are left out."""

from __future__ import annotations

from typing import Any

import pytest

from router.dialects.responses.tools import read_tools
from tests.unit.router.dialects.responses.codex import PATCH, PATCH_GRAMMAR, REQUEST, SHELL
from twostroke.base.errors import InvalidRequest


def test_a_function_is_that_of_chat_completions() -> None:
    (tool,) = read_tools([SHELL], None).chat_tools
    described = {name: SHELL[name] for name in ("name", "description", "parameters", "strict")}
    assert tool == {"type": "function", "function": described}


def test_a_function_written_as_in_chat_completions_is_read_too() -> None:
    nested = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    (tool,) = read_tools([nested], None).chat_tools
    assert tool["function"]["name"] == "look"


def test_a_custom_tool_is_a_function_with_one_text_and_tells_of_its_grammar() -> None:
    tools = read_tools([PATCH], None)
    (tool,) = tools.chat_tools
    assert tools.custom_names == {"apply_patch"}
    assert PATCH_GRAMMAR in tool["function"]["description"]
    assert tool["function"]["parameters"]["required"] == ["input"]


def test_tools_of_openais_servers_are_left_out() -> None:
    assert [tool["name"] for tool in read_tools(REQUEST["tools"], None).shown] == ["shell", "apply_patch"]


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, "auto"),
        ("none", "none"),
        ("required", "required"),
        ({"type": "function", "name": "shell"}, {"type": "function", "function": {"name": "shell"}}),
        ({"type": "custom", "name": "apply_patch"}, {"type": "function", "function": {"name": "apply_patch"}}),
    ],
)
def test_a_choice_is_that_of_chat_completions(choice: Any, expected: Any) -> None:
    assert read_tools([SHELL, PATCH], choice).chat_choice == expected


def test_the_model_sees_the_allowed_tools_alone() -> None:
    choice = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "shell"}]}
    tools = read_tools([SHELL, PATCH], choice)
    assert [tool["name"] for tool in tools.shown] == ["shell"]
    assert tools.chat_choice == "required"
    assert tools.choice == choice


@pytest.mark.parametrize(
    ("tools", "choice", "field"),
    [
        (5, None, "tools"),
        ([SHELL] * 1025, None, "tools"),
        (["shell"], None, "tools[0]"),
        ([{}], None, "tools[0]"),
        ([SHELL, {"type": "function"}], None, "tools[1]"),
        ([{**SHELL, "parameters": "x"}], None, "tools[0]"),
        ([{**SHELL, "description": 5}], None, "tools[0]"),
        ([{**PATCH, "format": {"type": "grammar"}}], None, "tools[0].format"),
        ([SHELL], "always", "tool_choice"),
        ([SHELL], 5, "tool_choice"),
        ([SHELL], {"type": "web_search_preview"}, "tool_choice"),
        ([SHELL], {"type": "function", "name": "look"}, "tool_choice"),
        ([SHELL], {"type": "allowed_tools", "mode": "auto"}, "tool_choice"),
        ([SHELL], {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "custom", "name": []}]}, "tool_choice"),
        ([SHELL], {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "custom", "name": {}}]}, "tool_choice"),
    ],
)
def test_what_is_no_tool_is_refused_by_name(tools: Any, choice: Any, field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        read_tools(tools, choice)
    assert refused.value.field == field


def test_a_tool_without_a_type_is_a_function() -> None:
    plain = {"name": "look", "parameters": {"type": "object"}}
    for tool in (plain, {**plain, "type": None}, {"function": plain}):
        (read,) = read_tools([tool], None).chat_tools
        assert read["type"] == "function"
        assert read["function"]["name"] == "look"
