"""Stock clients that ask for answers of a JSON schema, and for tool calls: whole and streamed."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path

import jsonschema

from tests.trials.clients.asks import PATIENCE_S, Json, Served
from tests.trials.clients.stock import ENVIRONMENTS, SCRIPTS, environment, installed_version

PERSON: Json = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
TOOL: Json = {"name": "add_person", "description": "Adds a person.", "parameters": PERSON, "strict": True}
ASKED = ("schema", "schema, stream", "tool", "tool, stream")
MAX_TOKENS = 400
"""Tokens of an answer: more than the schema's longest name and number have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredClient:
    name: str
    environment: str
    """Name of its environment, which other clients may share."""
    package: str
    script: str

    @property
    def asked(self) -> str:
        return "a JSON schema and a tool call, whole and streamed"

    @property
    def home(self) -> Path:
        return ENVIRONMENTS / self.environment

    @property
    def is_installed(self) -> bool:
        return (self.home / ".installed").exists()

    def version(self) -> str:
        return installed_version(self.home, self.package)

    def command(self) -> list[str]:
        script = str(SCRIPTS / self.script)
        return ["node", script] if script.endswith(".mjs") else [str(self.home / "bin/python"), script]

    def problems(self, served: Served, expected: dict[str, Json]) -> list[str]:
        """Streams must say what whole answers say, as nothing is random, and both what the schema wants."""
        done = subprocess.run(
            self.command(),
            input=json.dumps(_given(served)),
            capture_output=True,
            text=True,
            check=False,
            timeout=PATIENCE_S,
            cwd=self.home,
            env=environment(),
        )
        if done.returncode != 0:
            return [f"ended with {done.returncode}: {done.stderr[-2000:]}"]
        got = json.loads(done.stdout.splitlines()[-1])
        return [problem for asked in ASKED if (problem := _wrong(asked, got))]


def _given(served: Served) -> Json:
    return {
        "base_url": f"{served.url}/v1",
        "messages": [{"role": "user", "content": "Anna is 33 years old. Add her."}],
        "schema": PERSON,
        "tool": TOOL,
        "options": {"model": served.model, "max_tokens": MAX_TOKENS, "temperature": 0},
    }


def _wrong(asked: str, got: dict[str, Json]) -> str:
    value = got.get(asked)
    if value is None or value != got.get(asked.removesuffix(", stream")):
        return f"{asked}: {value}, and whole: {got.get(asked.removesuffix(', stream'))}"
    if asked.startswith("tool") and value["name"] != TOOL["name"]:
        return f"{asked}: the tool is {value['name']!r}"
    try:
        jsonschema.validate(value["arguments"] if asked.startswith("tool") else value, PERSON)
    except jsonschema.ValidationError as error:
        return f"{asked}: {error.message}"
    return ""


STRUCTURED = (
    StructuredClient(name="openai", environment="openai", package="openai", script="openai_structured.py"),
    StructuredClient(name="node", environment="node", package="openai", script="openai_structured.mjs"),
    StructuredClient(
        name="langchain", environment="langchain", package="langchain-openai", script="langchain_structured.py"
    ),
    StructuredClient(
        name="pydantic-ai", environment="pydantic-ai", package="pydantic-ai-slim", script="pydantic_ai_structured.py"
    ),
    StructuredClient(name="litellm", environment="litellm", package="litellm", script="litellm_structured.py"),
    StructuredClient(name="anthropic", environment="anthropic", package="anthropic", script="anthropic_structured.py"),
    StructuredClient(
        name="instructor", environment="instructor", package="instructor", script="instructor_structured.py"
    ),
)
