"""Hostile clients that send well-formed requests over HTTP: large, slow to serve, many, or with odd values."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from tests.trials.chaos.neighbours.target import Play, Table
from tests.trials.chaos.neighbours.wire import chat, completion, exchange, head, post

TABLE = Table("HTTP")
CHATS, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MEGABYTE = 1_000_000
WORDS = "the quick brown fox jumps over the lazy dog and reads the manual "


async def _send(play: Play, path: str, body: bytes, at_once: int = 4, headers: Mapping[str, str] | None = None) -> None:
    """The same request again and again."""
    request = post(play, path, body, headers)
    await play.repeat(lambda: exchange(play, request), at_once)


async def _send_each(play: Play, path: str, body: Callable[[], bytes], at_once: int = 4) -> None:
    """A new request each time."""
    await play.repeat(lambda: exchange(play, post(play, path, body())), at_once)


def _json(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


# Text


@TABLE.entry(key=True)
async def prompts_of_200_000_characters(play: Play) -> None:
    """Prompts that are far too long, of words (1)."""
    await _send(play, COMPLETIONS, completion(play, WORDS * 3000))


@TABLE.entry(key=True)
async def prompts_of_2_000_000_characters(play: Play) -> None:
    """The same, ten times as long (1)."""
    await _send(play, COMPLETIONS, completion(play, WORDS * 30_000))


@TABLE.entry(key=True)
async def prompts_of_8_megabytes(play: Play) -> None:
    """Sends prompts as long as a body may be (1, 13)."""
    await _send(play, COMPLETIONS, completion(play, "a b " * 1_990_000), at_once=2)


@TABLE.entry(key=True)
async def chats_of_2_megabytes(play: Play) -> None:
    """One message of 2 MB, through the chat template (1)."""
    await _send(play, CHATS, chat(play, WORDS * 30_000), at_once=2)


@TABLE.entry(key=True)
async def text_without_a_space(play: Play) -> None:
    """A run of 30,000 letters, which a tokenizer takes as one word."""
    await _send_each(play, COMPLETIONS, lambda: completion(play, "".join(play.draw.choices("abcde", k=30_000))))


@TABLE.entry(key=True)
async def combining_characters(play: Play) -> None:
    """Letters under thousands of combining marks, which normalization sorts."""
    await _send(play, COMPLETIONS, completion(play, "e" + "\u0301\u0323" * 15_000))


@TABLE.entry(key=True)
async def rare_characters(play: Play) -> None:
    """Emoji with joiners, ideographs and private characters."""
    text = "👩\u200d👩\u200d👧\u200d👦\U0002a6d6\ue000\u202e\u0000"
    await _send(play, COMPLETIONS, completion(play, text * 3000))


@TABLE.entry(key=True)
async def special_tokens_in_text(play: Play) -> None:
    """Chats full of the text of special tokens (31)."""
    await _send(play, CHATS, chat(play, "<|im_start|>system\n<|im_end|><|endoftext|>" * 2000))


@TABLE.entry(key=True)
async def tokenize_8_megabytes(play: Play) -> None:
    """`/tokenize` with 7.9 MB and `return_token_strs` (24)."""
    await _send(play, "/tokenize", _json(prompt="ab " * 2_630_000, return_token_strs=True), at_once=2)


@TABLE.entry(key=True)
async def tokenize_what_just_fits(play: Play) -> None:
    """`/tokenize` at the length that is taken, in a loop (24)."""
    await _send(play, "/tokenize", _json(prompt=WORDS * 460, return_token_strs=True))


@TABLE.entry(key=True)
async def tokenize_a_long_chat(play: Play) -> None:
    """`/tokenize` of a chat with thousands of messages."""
    messages = [{"role": "user", "content": "hello there"}] * 4096
    await _send(play, "/tokenize", _json(messages=messages))


@TABLE.entry(key=True)
async def detokenize_a_million(play: Play) -> None:
    """`/detokenize` with more tokens than the model takes."""
    await _send(play, "/detokenize", _json(tokens=[17] * MEGABYTE))


@TABLE.entry(key=True)
async def detokenize_what_just_fits(play: Play) -> None:
    """`/detokenize` with as many tokens as the model takes."""
    await _send_each(play, "/detokenize", lambda: _json(tokens=play.draw.choices(range(300, 1000), k=8000)))


# Shapes


@TABLE.entry(key=True)
async def many_prompts_with_a_bad_one_last(play: Play) -> None:
    """An array of 1,000 prompts, the last of them not a prompt (24)."""
    await _send(play, COMPLETIONS, completion(play, [*[WORDS * 100] * 999, [10**9]], max_tokens=1), at_once=2)


@TABLE.entry(key=True)
async def a_thousand_prompts(play: Play) -> None:
    """1,024 prompts in a request."""
    await _send(play, COMPLETIONS, completion(play, ["Good morning"] * 1024, max_tokens=4), at_once=2)


@TABLE.entry(key=True)
async def chats_of_4_096_messages(play: Play) -> None:
    """Sends as many messages as a chat may have."""
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "yes"}] * 2048
    await _send(play, CHATS, chat(play, messages=messages))


@TABLE.entry(key=True)
async def many_text_parts(play: Play) -> None:
    """A message of 100,000 parts."""
    parts = [{"type": "text", "text": "x"}] * 100_000
    await _send(play, CHATS, chat(play, messages=[{"role": "user", "content": parts}]))


@TABLE.entry(key=True)
async def deep_json(play: Play) -> None:
    """Arrays within arrays, 100,000 deep, and objects within objects."""
    deep = [b'{"prompt":' + b"[" * 100_000 + b"]" * 100_000 + b"}", b'{"a":' * 50_000 + b"1" + b"}" * 50_000]
    await _send_each(play, COMPLETIONS, lambda: play.draw.choice(deep))


@TABLE.entry(key=True)
async def wide_json(play: Play) -> None:
    """An object with 300,000 fields that nobody knows."""
    await _send(play, COMPLETIONS, _json(**{f"field_{number}": number for number in range(300_000)}), at_once=2)


@TABLE.entry(key=True)
async def bodies_of_numbers(play: Play) -> None:
    """A prompt of two million token ids."""
    await _send(play, COMPLETIONS, completion(play, [7] * 2_000_000), at_once=2)


@TABLE.entry(key=True)
async def huge_numbers(play: Play) -> None:
    """Integers of 4,300 digits, and numbers that are not numbers (29)."""
    digits = "9" * 4300
    numbers = (digits, f"-{digits}", "1e400", "NaN", "-Infinity", f"0.{digits}", f"1e{digits}")
    names = ("max_tokens", "seed", "n", "temperature")
    bodies = [f'{{"prompt":"x","{name}":{number}}}'.encode() for name in names for number in numbers]
    await _send_each(play, COMPLETIONS, lambda: play.draw.choice(bodies))


@TABLE.entry(key=True)
async def lone_surrogates(play: Play) -> None:
    """Text that is no Unicode, in every field that holds text (29)."""
    lone = "\ud800"
    parts = [{"type": "text", "text": lone}]
    bodies = [
        chat(play, messages=[{"role": "user", "content": parts}]),
        chat(play, messages=[{"role": lone, "content": "x"}]),
        completion(play, lone),
        completion(play, stop=[lone]),
        completion(play, user=lone, cache_salt=lone, request_id=lone),
        chat(play, model=lone),
    ]
    await _send_each(play, CHATS, lambda: play.draw.choice(bodies))


@TABLE.entry(key=True)
async def a_model_of_8_megabytes(play: Play) -> None:
    """A name of a model that is nearly as long as a body may be (28)."""
    await _send(play, COMPLETIONS, completion(play, model="m" * 7_900_000), at_once=2)


@TABLE.entry(key=True)
async def forged_request_ids(play: Play) -> None:
    """Request ids that look like fields of a log (28)."""
    ids = {"X-Request-Id": "mine error=None outcome=ok message=\u202ex".encode().decode("latin-1")}
    await _send(play, COMPLETIONS, completion(play, model="none"), headers=ids)


@TABLE.entry(key=True)
async def a_giant_logit_bias(play: Play) -> None:
    """A bias for every token of the vocabulary."""
    await _send(play, COMPLETIONS, completion(play, logit_bias={str(token): -100 for token in range(32_000)}))


@TABLE.entry(key=True)
async def tools_and_their_calls(play: Play) -> None:
    """Histories of tool calls, with `tool_choice` none (16)."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    turns = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "1"},
    ]
    tools = [{"type": "function", "function": {"name": f"f{n}", "parameters": {}}} for n in range(500)]
    messages = [{"role": "user", "content": "go"}, *turns * 200]
    await _send(play, CHATS, chat(play, messages=messages, tools=tools, tool_choice="none"))


# What takes long to serve


@TABLE.entry(key=True)
async def a_hundred_choices(play: Play) -> None:
    """Streams of 128 choices (4, 25)."""
    await _send(play, CHATS, chat(play, n=128, max_tokens=100, stream=True), at_once=2)


@TABLE.entry(key=True)
async def a_hundred_choices_with_logprobs(play: Play) -> None:
    """Streams of 128 choices with 20 log probabilities for each token: much output (4, 25)."""
    fields = {"n": 128, "max_tokens": 100, "stream": True, "logprobs": True, "top_logprobs": 20}
    await _send(play, CHATS, chat(play, **fields), at_once=2)


@TABLE.entry(key=True)
async def a_thousand_choices(play: Play) -> None:
    """Asks for as many choices as a request may have."""
    await _send(play, COMPLETIONS, completion(play, n=1024, max_tokens=20, stream=True), at_once=1)


@TABLE.entry(key=True)
async def resumable_choices(play: Play) -> None:
    """Streams of 128 choices that ask to be resumable (4, 12)."""
    await _send(play, CHATS, chat(play, n=128, max_tokens=50, stream=True), 2, {"X-Resumable-Stream": "true"})


@TABLE.entry(key=True)
async def long_stop_strings(play: Play) -> None:
    """16 stop strings of 1,024 characters that nearly come (5)."""
    stops = ["".join(play.draw.choices("ab ", k=1023)) + str(number) for number in range(16)]
    await _send(play, COMPLETIONS, completion(play, stop=stops, max_tokens=400, n=4, stream=True))


@TABLE.entry(key=True)
async def highest_priorities(play: Play) -> None:
    """Requests of the highest class, more than there is room for (6)."""
    await _send(play, COMPLETIONS, completion(play, priority=10**9, max_tokens=100), at_once=60)


@TABLE.entry(key=True)
async def huge_timeouts(play: Play) -> None:
    """Timeouts of ten billion seconds (8)."""
    await _send(play, COMPLETIONS, completion(play, WORDS * 20, timeout=1e10))


@TABLE.entry(key=True)
async def tiny_deadlines(play: Play) -> None:
    """Requests that are too late when they arrive, in a loop."""
    await _send(play, COMPLETIONS, completion(play, WORDS * 20, timeout=1e-6), at_once=8)


@TABLE.entry(key=True)
async def extreme_sampling(play: Play) -> None:
    """Sampling parameters at and beyond what a float holds (2)."""
    fields = [{"repetition_penalty": 1e39, "top_p": 0.5}, {"temperature": 1e-30, "min_p": 0.1}, {"top_k": 2**31 - 1}]
    fields += [{"frequency_penalty": 2, "presence_penalty": -2}, {"logit_bias": {"5": 1e39}}, {"temperature": 1e39}]
    await _send_each(play, COMPLETIONS, lambda: completion(play, max_tokens=20, **play.draw.choice(fields)))


@TABLE.entry(key=True)
async def the_longest_prompts_that_fit(play: Play) -> None:
    """Prompts that fill the model's length, each a new one: pages and prefill."""
    await _send_each(
        play, COMPLETIONS, lambda: completion(play, play.draw.choices(range(300, 1000), k=3000), max_tokens=1)
    )


# Ids


@TABLE.entry(key=True)
async def resume_tokens_by_the_thousand(play: Play) -> None:
    """Resumes tokens of streams that there are not (12)."""

    async def attempt() -> None:
        token = f"{play.draw.randbytes(8).hex()}~{play.draw.randbytes(8).hex()}:0:{play.draw.randrange(100)}"
        await exchange(play, post(play, CHATS, chat(play, stream=True), {"Last-Event-ID": token}))

    await play.repeat(attempt, 8)


@TABLE.entry(key=True)
async def streams_of_other_tenants(play: Play) -> None:
    """Resumes tokens and ids of other tenants, with a tenant's header (32)."""
    headers = {"X-Tenant-Id": "honest", "Last-Event-ID": "honest-0~0123456789abcdef:0:1", "X-Request-Id": "honest-0"}
    await _send(play, CHATS, chat(play, stream=True), headers=headers)


@TABLE.entry(key=True)
async def the_same_id_again(play: Play) -> None:
    """One request id for everything, many at once."""
    await _send(play, COMPLETIONS, completion(play, max_tokens=50), 16, {"X-Request-Id": "the-same"})


@TABLE.entry(key=False)
async def posts_from_a_foreign_page(play: Play) -> None:
    """What a browser sends for another site's page: `text/plain`, another origin, another host (32)."""
    headers = {"Origin": "http://evil.example", "Host": "evil.example", "Content-Type": "text/plain"}
    await _send(play, CHATS, chat(play), headers=headers)


@TABLE.entry(key=False)
async def preflights(play: Play) -> None:
    """A browser's questions whether it may (15)."""
    asks = {"Origin": "http://evil.example", "Access-Control-Request-Method": "POST"}
    request = head(play, "OPTIONS", CHATS, asks | {"Connection": "close"}) + b"\r\n"
    await play.repeat(lambda: exchange(play, request), 4)


@TABLE.entry(key=True)
async def small_chats_as_fast_as_they_go(play: Play) -> None:
    """Nothing odd: short chats, as many as a client can send."""
    await _send(play, CHATS, chat(play), at_once=8)
