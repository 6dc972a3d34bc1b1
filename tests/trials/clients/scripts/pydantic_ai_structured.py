"""pydantic-ai with typed output, natively and by a tool; the ask on stdin and what came on stdout are JSON."""

import asyncio
import json
import sys

from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider


class Person(BaseModel):
    name: str = Field(min_length=1, max_length=12)
    age: int = Field(ge=0, le=150)


async def answer(given, output, stream):
    provider = OpenAIProvider(base_url=given["base_url"], api_key="none")
    options = dict(given["options"])
    agent = Agent(OpenAIChatModel(options.pop("model"), provider=provider), output_type=output, retries=0)
    prompt = given["messages"][0]["content"]
    if not stream:
        return (await agent.run(prompt, model_settings=options)).output.model_dump()
    async with agent.run_stream(prompt, model_settings=options) as got:
        return (await got.get_output()).model_dump()


async def main():
    given = json.load(sys.stdin)
    got = {}
    for stream in (0, 1):
        got[f"schema{', stream' * stream}"] = await answer(given, NativeOutput(Person), stream)
        called = await answer(given, ToolOutput(Person, name=given["tool"]["name"]), stream)
        got[f"tool{', stream' * stream}"] = {"name": given["tool"]["name"], "arguments": called}
    json.dump(got, sys.stdout)


asyncio.run(main())
