"""LiteLLM asks for a JSON schema and for tool calls; the ask on stdin and what came on stdout are JSON.

Its provider is `openai`: with `hosted_vllm` it takes `strict` and `additionalProperties` out of tools.
"""

import json
import sys

import litellm


def message(given, stream, **asked):
    options = {**given["options"], **asked, "api_base": given["base_url"], "api_key": "none", "num_retries": 0}
    options["model"] = f"openai/{options['model']}"
    got = litellm.completion(messages=given["messages"], stream=bool(stream), **options)
    whole = litellm.stream_chunk_builder(list(got), messages=given["messages"]) if stream else got
    return whole.choices[0]


def schema(given, stream):
    wanted = {"type": "json_schema", "json_schema": {"name": "person", "schema": given["schema"], "strict": True}}
    return json.loads(message(given, stream, response_format=wanted).message.content)


def tool(given, stream):
    tools = [{"type": "function", "function": given["tool"]}]
    choice = message(given, stream, tools=tools, tool_choice="required", parallel_tool_calls=False)
    assert choice.finish_reason == "tool_calls", choice
    (call,) = choice.message.tool_calls
    return {"name": call.function.name, "arguments": json.loads(call.function.arguments)}


def main():
    given = json.load(sys.stdin)
    kinds = (("schema", schema), ("tool", tool))
    got = {f"{name}{', stream' * stream}": ask(given, stream) for name, ask in kinds for stream in (0, 1)}
    json.dump(got, sys.stdout)


main()
