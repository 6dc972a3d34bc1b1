"""LangChain's OpenAI models: asks on stdin, answers on stdout, both as JSON."""

import json
import sys

from langchain_core.exceptions import ContextOverflowError
from langchain_openai import ChatOpenAI


def answer(given, ask):
    model = ChatOpenAI(
        model=given["model"],
        base_url=given["base_url"],
        api_key="none",
        max_tokens=ask["max_tokens"],
        temperature=0,
        stream_usage=True,
        max_retries=0,
    )
    messages = [(message["role"], message["content"]) for message in ask["messages"]]
    if ask["stream"]:
        parts = list(model.stream(messages))
        whole = parts[0]
        for part in parts[1:]:
            whole += part
    else:
        whole = model.invoke(messages)
    usage = whole.usage_metadata
    return {
        "text": whole.content,
        "prompt_tokens": usage["input_tokens"],
        "completion_tokens": usage["output_tokens"],
    }


def main():
    given = json.load(sys.stdin)
    answers = {ask["name"]: answer(given, ask) for ask in given["asks"] if "messages" in ask}
    try:
        answer(given, given["too_long"])
    except ContextOverflowError as error:
        answers["too long"] = {"error": type(error).__name__}
    json.dump(answers, sys.stdout)


main()
