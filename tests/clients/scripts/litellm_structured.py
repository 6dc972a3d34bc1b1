"""LiteLLM asks for a JSON schema and for tool calls: what to ask on stdin, what came on stdout, both as JSON."""

import json
import sys

import litellm


def message_of(given, stream, **asked):
    options = {**given["options"], **asked}
    model = f"hosted_vllm/{options.pop('model')}"
    got = litellm.completion(
        model=model,
        messages=given["messages"],
        api_base=given["base_url"],
        api_key="none",
        stream=bool(stream),
        **options,
    )
    return (litellm.stream_chunk_builder(list(got)) if stream else got).choices[0].message


def schema(given, stream):
    wanted = {"type": "json_schema", "json_schema": {"name": "person", "schema": given["schema"], "strict": True}}
    return json.loads(message_of(given, stream, response_format=wanted).content)


def tool(given, stream):
    tools = [{"type": "function", "function": given["tool"]}]
    call = message_of(
        given,
        stream,
        tools=tools,
        tool_choice="required",
        parallel_tool_calls=False,
        allowed_openai_params=["parallel_tool_calls"],
    ).tool_calls[0]
    return {"name": call.function.name, "arguments": json.loads(call.function.arguments)}


def main():
    given = json.load(sys.stdin)
    kinds = (("schema", schema), ("tool", tool))
    got = {f"{name}{', stream' * stream}": ask(given, stream) for name, ask in kinds for stream in (0, 1)}
    json.dump(got, sys.stdout)


main()
