"""pydantic-ai's agents: asks on stdin, answers on stdout, both as JSON."""

import asyncio
import json
import sys

from pydantic_ai import Agent
from pydantic_ai.exceptions import ModelHTTPError
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider


async def answer(given, ask):
    provider = OpenAIProvider(base_url=given["base_url"], api_key="none")
    kind = OpenAIResponsesModel if "input" in ask else OpenAIChatModel
    agent = Agent(kind(given["model"], provider=provider))
    settings = {"max_tokens": ask["max_tokens"], "temperature": 0.0}
    prompt = (ask.get("messages") or ask["input"])[0]["content"]
    if ask["stream"]:
        async with agent.run_stream(prompt, model_settings=settings) as got:
            text = "".join([part async for part in got.stream_text(delta=True)])
            usage = got.usage
    else:
        got = await agent.run(prompt, model_settings=settings)
        text, usage = got.output, got.usage
    usage = usage() if callable(usage) else usage
    return {"text": text, "prompt_tokens": usage.input_tokens, "completion_tokens": usage.output_tokens}


async def main():
    given = json.load(sys.stdin)
    answers = {ask["name"]: await answer(given, ask) for ask in given["asks"] if "prompt" not in ask}
    try:
        await answer(given, given["too_long"])
    except ModelHTTPError as error:
        answers["too long"] = {"error": error.body["code"]}
    json.dump(answers, sys.stdout)


asyncio.run(main())
