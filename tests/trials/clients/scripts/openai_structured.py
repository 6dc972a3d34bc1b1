"""The openai package asks for a JSON schema and for tool calls; the ask on stdin and what came on stdout are JSON."""

import json
import sys

from openai import OpenAI


def schema(client, given, stream):
    wanted = {"type": "json_schema", "json_schema": {"name": "person", "schema": given["schema"], "strict": True}}
    options = {"messages": given["messages"], "response_format": wanted, **given["options"]}
    if not stream:
        return json.loads(client.chat.completions.create(**options).choices[0].message.content)
    with client.chat.completions.stream(**options) as events:
        for _ in events:
            pass
        return json.loads(events.get_final_completion().choices[0].message.content)


def tool(client, given, stream):
    tools = [{"type": "function", "function": given["tool"]}]
    options = {
        "messages": given["messages"],
        "tools": tools,
        "tool_choice": "required",
        "parallel_tool_calls": False,
        **given["options"],
    }
    if stream:
        with client.chat.completions.stream(**options) as events:
            for _ in events:
                pass
            choice = events.get_final_completion().choices[0]
    else:
        choice = client.chat.completions.create(**options).choices[0]
    assert choice.finish_reason == "tool_calls", choice
    call = choice.message.tool_calls[0]
    return {"name": call.function.name, "arguments": json.loads(call.function.arguments)}


def main():
    given = json.load(sys.stdin)
    client = OpenAI(base_url=given["base_url"], api_key="none", max_retries=0)
    kinds = (("schema", schema), ("tool", tool))
    got = {f"{name}{', stream' * stream}": ask(client, given, stream) for name, ask in kinds for stream in (0, 1)}
    json.dump(got, sys.stdout)


main()
