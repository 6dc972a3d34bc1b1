"""The openai package, run by a Python that has nothing else: asks on stdin, answers on stdout, both as JSON."""

import json
import sys

from openai import BadRequestError, OpenAI


def answer(client, model, ask):
    if "input" in ask:
        return response(client, {"model": model, "input": ask["input"], "max_output_tokens": ask["max_tokens"]}, ask)
    options = {"model": model, "max_tokens": ask["max_tokens"], "temperature": 0}
    if ask["stream"]:
        options |= {"stream": True, "stream_options": {"include_usage": True}}
    if "messages" in ask:
        got = client.chat.completions.create(messages=ask["messages"], **options)
        text_of = (lambda choice: choice.delta.content) if ask["stream"] else (lambda choice: choice.message.content)
    else:
        got = client.completions.create(prompt=ask["prompt"], **options)
        text_of = lambda choice: choice.text  # noqa: E731
    chunks = list(got) if ask["stream"] else [got]
    texts = [text_of(choice) or "" for chunk in chunks for choice in chunk.choices]
    return {"text": "".join(texts), **counts(chunks[-1].usage)}


def response(client, options, ask):
    if ask["stream"]:
        events = list(client.responses.create(stream=True, temperature=0, **options))
        got = events[-1].response
        deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
        assert "".join(deltas) == got.output_text, (deltas, got)
        assert [event.sequence_number for event in events] == list(range(len(events)))
    else:
        got = client.responses.create(temperature=0, **options)
    counted = client.responses.input_tokens.count(model=options["model"], input=options["input"])
    assert counted.input_tokens == got.usage.input_tokens, (counted, got.usage)
    usage = {"prompt_tokens": got.usage.input_tokens, "completion_tokens": got.usage.output_tokens}
    return {"text": got.output_text, **usage}


def counts(usage):
    return {"prompt_tokens": usage.prompt_tokens, "completion_tokens": usage.completion_tokens}


def main():
    given = json.load(sys.stdin)
    client = OpenAI(base_url=given["base_url"], api_key="none", max_retries=0)
    answers = {ask["name"]: answer(client, given["model"], ask) for ask in given["asks"]}
    try:
        answer(client, given["model"], given["too_long"])
    except BadRequestError as error:
        answers["too long"] = {"error": error.code}
    json.dump(answers, sys.stdout)


main()
