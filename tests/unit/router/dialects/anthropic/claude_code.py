"""What Claude Code 2.1 sends in the second round of a task, written by hand after what others saw of it."""

from __future__ import annotations

import json
from typing import Any

HEADERS = {
    "anthropic-version": "2023-06-01",
    "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14,context-management-2025-06-27",
    "x-app": "cli",
    "user-agent": "claude-cli/2.1.177 (external, cli)",
    "x-stainless-retry-count": "0",
    "x-stainless-timeout": "600",
}

CLAUDE_CODE: dict[str, Any] = json.loads(r"""
{
  "model": "toy",
  "max_tokens": 32000,
  "stream": true,
  "temperature": 1,
  "system": [
    {"type": "text",
     "text": "x-anthropic-billing-header: cc_version=2.1.177.01c; cc_entrypoint=cli; cch=36ee5;"},
    {"type": "text", "text": "You are Claude Code, Anthropic's official CLI for Claude.",
     "cache_control": {"type": "ephemeral"}},
    {"type": "text", "text": "You are an interactive agent that helps users with software engineering tasks.",
     "cache_control": {"type": "ephemeral"}}
  ],
  "messages": [
    {"role": "user", "content": [
      {"type": "text", "text": "<system-reminder>\nToday's date is 2026-11-26.\n</system-reminder>"},
      {"type": "text", "text": "List the files here.", "cache_control": {"type": "ephemeral", "ttl": "1h"}}]},
    {"role": "assistant", "content": [
      {"type": "thinking", "thinking": "I call the tool.", "signature": "EqQB"},
      {"type": "text", "text": "I look."},
      {"type": "tool_use", "id": "toolu_01", "name": "Bash", "input": {"command": "ls"}}]},
    {"role": "user", "content": [
      {"type": "tool_result", "tool_use_id": "toolu_01", "is_error": false,
       "content": [{"type": "text", "text": "README.md"}]},
      {"type": "text", "text": "And now?", "cache_control": {"type": "ephemeral"}}]},
    {"role": "system", "content": "Token usage: 1200/200000; 198800 remaining"}
  ],
  "tools": [
    {"name": "Bash", "description": "Executes a command.",
     "input_schema": {"$schema": "https://json-schema.org/draft/2020-12/schema", "type": "object",
                      "properties": {"command": {"type": "string"}}, "required": ["command"],
                      "additionalProperties": false}},
    {"name": "Read", "description": "Reads a file.", "eager_input_streaming": true,
     "input_schema": {"type": "object", "properties": {"file_path": {"type": "string"}}}}
  ],
  "metadata": {"user_id": "{\"device_id\":\"0123456789abcdef\",\"account_uuid\":\"\",\"session_id\":\"4b6c\"}"},
  "thinking": {"type": "adaptive"},
  "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
  "output_config": {"effort": "medium"}
}
""")
