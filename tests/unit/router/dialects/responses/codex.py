"""A request in the form in which Codex CLI sends it in the middle of a session."""

from __future__ import annotations

from typing import Any

PATCH_GRAMMAR = 'start: "*** Begin Patch" LF hunk+ "*** End Patch" LF?'

SHELL = {
    "type": "function",
    "name": "shell",
    "description": "Runs a command.",
    "strict": False,
    "parameters": {"type": "object", "properties": {"command": {"type": "array", "items": {"type": "string"}}}},
}
PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Changes files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": PATCH_GRAMMAR},
}

INPUT: list[dict[str, Any]] = [
    {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Sandbox: off."}]},
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Mend it."}]},
    {"type": "reasoning", "summary": [], "content": None, "encrypted_content": "gAAAAABoXYZ"},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}], "phase": None},
    {"type": "function_call", "name": "shell", "arguments": '{"command":["ls"]}', "call_id": "call_1"},
    {"type": "function_call_output", "call_id": "call_1", "output": "a.py"},
    {"type": "web_search_call", "status": "completed", "action": {"type": "search", "query": "x"}},
    {
        "type": "custom_tool_call",
        "status": "completed",
        "call_id": "call_2",
        "name": "apply_patch",
        "input": "*** Begin",
    },
    {"type": "custom_tool_call_output", "call_id": "call_2", "output": [{"type": "input_text", "text": "Done"}]},
    {
        "type": "agent_message",
        "author": "/root/helper",
        "recipient": "/root",
        "content": [{"type": "input_text", "text": "Ready."}],
    },
]

REQUEST: dict[str, Any] = {
    "model": "toy",
    "instructions": "You are Codex.",
    "input": INPUT,
    "tools": [
        SHELL,
        PATCH,
        {"type": "web_search", "external_web_access": False},
        {"type": "namespace", "name": "mcp__x__", "description": "x", "tools": [SHELL]},
        {"type": "image_generation", "output_format": "png"},
        {"type": "local_shell"},
        {"type": "mcp", "server_label": "x"},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "0199c5c4-7c9b-7d42-8a3b-2f6d1a2b3c4d",
    "text": {"verbosity": "low"},
    "client_metadata": {"session_id": "0199c5c4"},
}

SAID = """<think>
Look first.
</think>

I look and mend.
<tool_call>
{"name": "shell", "arguments": {"command": ["ls"]}}
</tool_call>
<tool_call>
{"name": "apply_patch", "arguments": {"input": "*** Begin Patch\\n"}}
</tool_call>"""
"""An answer in hermes' form: reasoning, text, a call of a function and one of a custom tool."""
