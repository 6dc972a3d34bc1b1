"""Bodies of /v1/chat/completions and /v1/completions as editors, agents and chat programs send them.

They are written by hand after what these programs are known to send (their sources and issues), not captured.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    client: str
    path: str
    body: Json
    """Without `model`, which the test adds."""


CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"

READ_FILE: Json = {
    "type": "function",
    "function": {
        "name": "read_file",
        "description": "Reads a file.",
        "parameters": {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "type": "object",
            "properties": {"path": {"type": "string", "description": "Path of the file."}},
            "required": ["path"],
            "additionalProperties": False,
        },
    },
}
TALK: list[Json] = [
    {"role": "system", "content": "You are a helpful assistant."},
    {"role": "user", "content": [{"type": "text", "text": "Say hello."}]},
]
AGENT_TALK: list[Json] = [
    {"role": "system", "content": "You are a coding agent.", "cache_control": {"type": "ephemeral"}},
    {"role": "user", "content": "What does a.py do?"},
    {
        "role": "assistant",
        "content": None,
        "reasoning_content": "I should read it.",
        "providerOptions": {"openaiCompatible": {"reasoning": "kept"}},
        "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "read_file", "arguments": '{"path": "a.py"}'}}
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "print(1)"},
]

RECORDED = (
    Recorded(
        client="Continue, chat",
        path=CHAT,
        body={
            "messages": TALK,
            "max_tokens": 16,
            "stream": True,
            "temperature": 0.5,
            "stop": [f"<|stop_{rank}|>" for rank in range(14)],
            "stream_options": {"include_usage": True},
        },
    ),
    Recorded(
        client="Continue, completion at the cursor",
        path=COMPLETION,
        body={
            "prompt": "def add(a, b):\n    return ",
            "max_tokens": 16,
            "temperature": 0.01,
            "stop": [
                "\n\n",
                "```",
                "\r\n\r\n",
                "/src/",
                "#- coding: utf-8",
                "<fim_prefix>",
                "<fim_suffix>",
                "function",
            ],
            "stream": True,
            "presence_penalty": None,
            "frequency_penalty": None,
            "suffix": None,
        },
    ),
    Recorded(
        client="aider",
        path=CHAT,
        body={"messages": [TALK[0], {"role": "user", "content": "Fix it."}], "temperature": 0, "stream": True},
    ),
    Recorded(
        client="Open WebUI, chat",
        path=CHAT,
        body={
            "messages": TALK,
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": 16,
            "frequency_penalty": 0,
            "top_k": 40,
            "tool_choice": None,
        },
    ),
    Recorded(
        client="Open WebUI, title of a chat",
        path=CHAT,
        body={
            "messages": [{"role": "user", "content": "Name this chat."}],
            "stream": False,
            "max_completion_tokens": 16,
        },
    ),
    Recorded(
        client="opencode",
        path=CHAT,
        body={
            "messages": AGENT_TALK,
            "tools": [READ_FILE],
            "tool_choice": "auto",
            "max_tokens": 4_000,
            "stream": True,
            "stream_options": {"include_usage": True},
            "reasoning_effort": "medium",
            "textVerbosity": "low",
        },
    ),
    Recorded(
        client="LangChain, any tool",
        path=CHAT,
        body={
            "messages": TALK,
            "tools": [READ_FILE],
            "tool_choice": "required",
            "parallel_tool_calls": False,
            "max_completion_tokens": 64,
            "n": 1,
            "stream": False,
        },
    ),
    Recorded(
        client="LiteLLM and OpenHands",
        path=CHAT,
        body={
            "messages": AGENT_TALK,
            "metadata": {"trace": "1"},
            "store": False,
            "service_tier": "auto",
            "seed": None,
            "logit_bias": None,
            "max_tokens": 16,
        },
    ),
    Recorded(
        client="LiveKit",
        path=CHAT,
        body={
            "messages": [{"role": "developer", "content": "Be short."}, TALK[1]],
            "store": True,
            "metadata": {},
            "prompt_cache_key": "room-1",
            "safety_identifier": "u1",
            "verbosity": "low",
            "stream": True,
            "max_completion_tokens": 16,
        },
    ),
)
