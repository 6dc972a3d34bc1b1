"""The anthropic package, run by a Python that has nothing else: asks on stdin, answers on stdout, both as JSON."""

import json
import sys

from anthropic import Anthropic, BadRequestError, NotFoundError

WORDS_OF_A_LONG_PROMPT = 20_000
"""More than any window here has: a limit of the answer is never too long in this API."""


def answer(client, model, ask):
    options = {"model": model, "max_tokens": ask["max_tokens"], "messages": ask["messages"]}
    if ask["stream"]:
        with client.messages.stream(**options, extra_body={"temperature": 0}) as stream:
            texts = list(stream.text_stream)
            got = stream.get_final_message()
        assert "".join(texts) == got.content[0].text, (texts, got)
    else:
        got = client.messages.create(**options, extra_body={"temperature": 0})
    assert got.stop_reason in ("end_turn", "max_tokens"), got
    usage = got.usage
    prompt_tokens = usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens
    counted = client.messages.count_tokens(model=model, messages=ask["messages"])
    assert counted.input_tokens == prompt_tokens, (counted, usage)
    return {"text": got.content[0].text, "prompt_tokens": prompt_tokens, "completion_tokens": usage.output_tokens}


def lists_models(client, model):
    (listed,) = client.models.list(limit=1)
    assert (listed.type, listed.id) == ("model", model), listed
    assert client.models.retrieve(model) == listed, listed
    try:
        client.models.retrieve("nothing")
    except NotFoundError as error:
        return error.body["error"]["type"] == "not_found_error"
    return False


def main():
    given = json.load(sys.stdin)
    client = Anthropic(base_url=given["base_url"].removesuffix("/v1"), api_key="none", max_retries=0)
    assert lists_models(client, given["model"]), "a model that is not there is not found, as Anthropic's API says it"
    asks = [ask for ask in given["asks"] if "messages" in ask]
    answers = {ask["name"]: answer(client, given["model"], ask) for ask in asks}
    long = {**asks[0], "messages": [{"role": "user", "content": "word " * WORDS_OF_A_LONG_PROMPT}]}
    try:
        answer(client, given["model"], long)
    except BadRequestError as error:
        answers["too long"] = {"error": error.api_message.partition(":")[0]}
    json.dump(answers, sys.stdout)


main()
