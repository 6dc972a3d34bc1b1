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
        use_responses_api="input" in ask,
    )
    messages = [(message["role"], message["content"]) for message in ask.get("messages") or ask["input"]]
    if ask["stream"]:
        parts = list(model.stream(messages))
        whole = parts[0]
        for part in parts[1:]:
            whole += part
    else:
        whole = model.invoke(messages)
    usage = whole.usage_metadata
    return {
        "text": whole.text if isinstance(whole.text, str) else whole.text(),
        "prompt_tokens": usage["input_tokens"],
        "completion_tokens": usage["output_tokens"],
    }


def main():
    given = json.load(sys.stdin)
    answers = {ask["name"]: answer(given, ask) for ask in given["asks"] if "prompt" not in ask}
    try:
        answer(given, given["too_long"])
    except ContextOverflowError as error:
        answers["too long"] = {"error": type(error).__name__}
    json.dump(answers, sys.stdout)


main()
