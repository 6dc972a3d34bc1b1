"""LangChain asks for a JSON schema and for tool calls: what to ask on stdin, what came on stdout, both as JSON."""

import json
import sys

from langchain_openai import ChatOpenAI


def whole_of(runnable, messages, stream):
    if not stream:
        return runnable.invoke(messages)
    whole = None
    for part in runnable.stream(messages):
        whole = part if whole is None or isinstance(part, dict) else whole + part
    return whole


def main():
    given = json.load(sys.stdin)
    options = {**given["options"]}
    model = ChatOpenAI(base_url=given["base_url"], api_key="none", max_retries=0, **options)
    messages = [(message["role"], message["content"]) for message in given["messages"]]
    titled = {"title": "person", "description": "A person.", **given["schema"]}
    structured = model.with_structured_output(titled, method="json_schema", strict=True)
    bound = model.bind_tools([{"type": "function", "function": given["tool"]}], tool_choice="any")
    got = {}
    for stream in (0, 1):
        got[f"schema{', stream' * stream}"] = whole_of(structured, messages, stream)
        (call, *_) = whole_of(bound, messages, stream).tool_calls
        got[f"tool{', stream' * stream}"] = {"name": call["name"], "arguments": call["args"]}
    json.dump(got, sys.stdout)


main()
