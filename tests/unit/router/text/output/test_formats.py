"""Which formats flags and chat templates name."""

from __future__ import annotations

from typing import Any

import pytest

from router.text.output.output_formats import REASONING_BY_NAME, TOOLS_BY_NAME
from router.text.output.parsing import OutputFormats, Parsing, callable_tools
from twostroke.base.errors import ConfigError
from twostroke.config.output import REASONING_PARSERS, TOOL_PARSERS, OutputConfig


def test_flags_take_the_names_of_the_tables() -> None:
    assert set(TOOL_PARSERS) == set(TOOLS_BY_NAME)
    assert set(REASONING_PARSERS) == set(REASONING_BY_NAME)


@pytest.mark.parametrize(
    ("template", "formats"),
    [
        ("{{ messages }}", OutputFormats()),
        ('<tool_call>\\n{"name": <function-name>}', OutputFormats("hermes")),
        ("<tool_call>\n<function=example>", OutputFormats("qwen3_coder")),
        ("{{ '<think>' }}<tool_call>", OutputFormats("hermes", "think")),
        ("<|start|>assistant<|channel|>final<|message|>", OutputFormats("harmony", "harmony")),
        ("[TOOL_CALLS]", OutputFormats("mistral")),
        ("[func_name1(params_name1=params_value1)]", OutputFormats("pythonic")),
        ("<|python_tag|>", OutputFormats("llama3_json")),
    ],
)
def test_the_chat_template_shows_the_formats(template: str, formats: OutputFormats) -> None:
    assert OutputFormats.of(template, OutputConfig()) == formats
    assert OutputFormats.of(template, OutputConfig(tool_call_parser="none", reasoning_parser="none")) == OutputFormats()


def test_a_flag_wins_over_the_template() -> None:
    config = OutputConfig(tool_call_parser="openai", reasoning_parser="none")
    assert OutputFormats.of("<tool_call><think>", config) == OutputFormats("harmony", "")
    config = OutputConfig(tool_call_parser="hermes", reasoning_parser="harmony")
    with pytest.raises(ConfigError, match="--reasoning-parser harmony does not go with --tool-call-parser hermes"):
        OutputFormats.of("", config)


def test_calls_have_the_same_ids_at_every_router_and_mistrals_have_nine_characters() -> None:
    for name, output, length in (
        ("hermes", '<tool_call>{"name": "f", "arguments": {}}</tool_call>', 29),
        ("mistral", "[TOOL_CALLS]f[ARGS]{}", 9),
    ):
        parsing = Parsing(formats=OutputFormats(name), tools={"f": {}})
        ids = [parsing.parser("stream~1", choice).feed(output)[0].call_id for choice in (0, 0, 1)]  # type: ignore[union-attr]  # it is a call
        assert ids[0] == ids[1] != ids[2]
        assert len(ids[0]) == length


def test_tools_without_a_schema_take_any_arguments() -> None:
    schema = {"properties": {"a": {"type": "string"}}}
    functions: list[dict[str, Any]] = [
        {"name": "t", "parameters": schema},
        {"name": "u"},
        {"name": "v", "parameters": 5},
    ]
    assert callable_tools([{"function": each} for each in functions]) == {"t": schema, "u": {}, "v": {}}
