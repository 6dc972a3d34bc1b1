"""Logprobs of answers and of prompts, in OpenAI's forms and in vLLM's."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from router.dialects.reply import Json, finite
from router.text.tokenizer import Text, token_text
from twostroke.request import PromptLogprobs, SampledToken


def chat_logprob(text: Text, name: Callable[[int], str], token: SampledToken) -> Json:
    """Returns the logprobs of a token and its alternatives, as chats and responses show them.

    `name` returns what a token is called.
    """

    def entry(token: int, logprob: float | None) -> Json:
        return {"token": name(token), "logprob": finite(logprob), "bytes": list(text.token_bytes(token))}

    return {**entry(token.token, token.logprob), "top_logprobs": [entry(*other) for other in token.top]}


def completion_logprobs(
    text: Text,
    name: Callable[[int], str],
    ids: Sequence[int],
    logprobs: Sequence[float | None],
    tops: Sequence[Json | None],
    offset: int,
) -> Json:
    """Returns logprobs in the form of OpenAI's completions; the first token's text begins at `offset`.

    `name` returns what a token is called.
    """
    offsets = []
    for token in ids:
        offsets.append(offset)
        offset += len(token_text(text, token))
    names = list(map(name, ids))
    return {"tokens": names, "token_logprobs": list(logprobs), "top_logprobs": list(tops), "text_offset": offsets}


def joined(first: Json, second: Json) -> Json:
    """Returns logprobs of two pieces of text that follow one another."""
    return {name: [*values, *second[name]] for name, values in first.items()}


def echoed_logprobs(
    text: Text, name: Callable[[int], str], ids: Sequence[int], scores: PromptLogprobs | None, top: int
) -> Json:
    """Returns logprobs of the prompt as OpenAI's completions show them. The first token has none."""
    logprobs: list[float | None] = [None] * len(ids)
    tops: list[Json | None] = [None] * len(ids)
    for index in range(len(scores or ())):
        assert scores is not None
        own = logprobs[index + 1] = finite(scores.logprobs[index])
        likeliest = {name(token): finite(logprob) for token, logprob in scores.top(index)[:top]}
        tops[index + 1] = {**likeliest, name(ids[index + 1]): own}
    return completion_logprobs(text, name, ids, logprobs, tops, 0)


def prompt_logprobs(text: Text, ids: Sequence[int], scores: PromptLogprobs | None, top: int) -> list[Json | None]:
    """Returns logprobs of the prompt as vLLM shows them: by token id, the prompt's own token first."""
    shown: list[Json | None] = [None] * len(ids)
    for index in range(len(scores or ())):
        assert scores is not None
        own = ids[index + 1]
        entries = {own: _entry(text, own, scores.logprobs[index], scores.ordinals[index])}
        for position, (token, logprob) in enumerate(scores.top(index)[:top], 1):
            entries.setdefault(token, _entry(text, token, logprob, position))
        shown[index + 1] = {str(token): entry for token, entry in entries.items()}
    return shown


def _entry(text: Text, token: int, logprob: float, position: int) -> Json:
    return {"logprob": finite(logprob), "rank": position, "decoded_token": token_text(text, token)}
