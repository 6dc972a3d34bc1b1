"""instructor's modes of JSON schemas and of tools: what to ask on stdin, what came on stdout, both as JSON."""

import json
import sys

import instructor
from openai import OpenAI
from pydantic import BaseModel, ConfigDict, Field


class Person(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: str = Field(min_length=1, max_length=12)
    age: int = Field(ge=0, le=150)


def answer(given, mode, stream):
    client = instructor.from_openai(OpenAI(base_url=given["base_url"], api_key="none", max_retries=0), mode=mode)
    options = {"messages": given["messages"], "response_model": Person, "max_retries": 0, **given["options"]}
    if not stream:
        return client.chat.completions.create(**options).model_dump()
    *_, last = client.chat.completions.create_partial(**options)
    return last.model_dump()


def main():
    given = json.load(sys.stdin)
    got = {}
    for stream in (0, 1):
        got[f"schema{', stream' * stream}"] = answer(given, instructor.Mode.JSON_SCHEMA, stream)
        called = answer(given, instructor.Mode.TOOLS, stream)
        got[f"tool{', stream' * stream}"] = {"name": given["tool"]["name"], "arguments": called}
    json.dump(got, sys.stdout)


main()
