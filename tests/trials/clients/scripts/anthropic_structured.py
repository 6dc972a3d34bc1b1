"""The anthropic package asks for a JSON schema and for tool calls; both sides are JSON, on stdin and stdout."""

import json
import sys

from anthropic import Anthropic


def message(client, given, stream, **fields):
    model, max_tokens = given["options"]["model"], given["options"]["max_tokens"]
    options = {"model": model, "max_tokens": max_tokens, "messages": given["messages"], **fields}
    options["extra_body"] = {"temperature": given["options"]["temperature"]}
    if not stream:
        return client.messages.create(**options)
    with client.messages.stream(**options) as events:
        return events.get_final_message()


def schema(client, given, stream):
    wanted = {"type": "json_schema", "schema": given["schema"]}
    (block,) = message(client, given, stream, output_config={"format": wanted}).content
    return json.loads(block.text)


def tool(client, given, stream):
    told = given["tool"]
    tools = [{"name": told["name"], "description": told["description"], "input_schema": told["parameters"]}]
    got = message(client, given, stream, tools=tools, tool_choice={"type": "any", "disable_parallel_tool_use": True})
    assert got.stop_reason == "tool_use", got
    (call,) = (block for block in got.content if block.type == "tool_use")
    return {"name": call.name, "arguments": call.input}


def main():
    given = json.load(sys.stdin)
    client = Anthropic(base_url=given["base_url"].removesuffix("/v1"), api_key="none", max_retries=0)
    kinds = (("schema", schema), ("tool", tool))
    got = {f"{name}{', stream' * stream}": ask(client, given, stream) for name, ask in kinds for stream in (0, 1)}
    json.dump(got, sys.stdout)


main()
