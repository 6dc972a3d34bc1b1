"""How a model's answers are taken apart into text, reasoning and tool calls."""

from __future__ import annotations

from twostroke.config.settings import Settings, setting

AUTO, NONE = "auto", "none"
TOOL_PARSERS = (
    *("harmony", "hermes", "llama3_json", "mistral", "pythonic", "qwen3_coder"),
    *("llama4_json", "llama4_pythonic", "openai", "qwen3_xml"),
)
REASONING_PARSERS = ("harmony", "think", "deepseek_r1", "openai_gptoss", "qwen3")


class OutputConfig(Settings):
    tool_call_parser: str = setting(
        AUTO,
        choices=(AUTO, NONE, *TOOL_PARSERS),
        help="format in which the model writes tool calls; auto: what its chat template shows",
    )
    reasoning_parser: str = setting(
        AUTO,
        choices=(AUTO, NONE, *REASONING_PARSERS),
        help="format in which the model writes reasoning; auto: what its chat template shows",
    )
