"""LiteLLM as its users point it at vLLM's servers: asks on stdin, answers on stdout, both as JSON."""

import json
import sys

import litellm


def answer(given, ask):
    options = {"api_base": given["base_url"], "api_key": "none", "max_tokens": ask["max_tokens"], "temperature": 0}
    if ask["stream"]:
        options |= {"stream": True, "stream_options": {"include_usage": True}}
    if "messages" in ask:
        got = litellm.completion(model=f"hosted_vllm/{given['model']}", messages=ask["messages"], **options)
        text_of = (lambda choice: choice.delta.content) if ask["stream"] else (lambda choice: choice.message.content)
    else:
        got = litellm.text_completion(model=f"hosted_vllm/{given['model']}", prompt=ask["prompt"], **options)
        text_of = lambda choice: choice.text  # noqa: E731
    chunks = list(got) if ask["stream"] else [got]
    texts = [text_of(choice) or "" for chunk in chunks for choice in chunk.choices]
    usages = [chunk.usage for chunk in chunks if getattr(chunk, "usage", None)]
    counted = {"prompt_tokens": usages[-1].prompt_tokens, "completion_tokens": usages[-1].completion_tokens}
    return {"text": "".join(texts), **counted}


def main():
    given = json.load(sys.stdin)
    answers = {ask["name"]: answer(given, ask) for ask in given["asks"] if "input" not in ask}
    try:
        answer(given, given["too_long"])
    except litellm.ContextWindowExceededError as error:
        answers["too long"] = {"error": type(error).__name__}
    json.dump(answers, sys.stdout)


main()
