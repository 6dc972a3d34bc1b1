"""Fields of vLLM that name tokens by their ids, or say what of an answer is wanted, and those that are refused."""

from __future__ import annotations

import json
from array import array
from typing import Any

import pytest

from router.dialects.kserve.schema import parse_generate
from router.dialects.openai.schema import parse_chat
from router.dialects.table import DIALECTS, Dialect
from router.preparation.prepare import prepare
from router.requests.resume import SentProgress, StreamPoint
from router.requests.work import Work
from router.text.output.events import TextEvent
from router.text.prompts import ChatPrompt
from router.text.tokenizer import ByteText
from tests.hand_cut import messages_of
from tests.unit.router.conftest import FACTS, Frontend
from tests.unit.router.dialects.openai.test_tool_calls import THOUGHT, client
from twostroke.request import SampledToken, token_bits

CHAT, TEXT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
BODIES: dict[str, dict[str, Any]] = {
    CHAT: ASK,
    TEXT: {"prompt": "hi"},
    RESPONSES: {"input": "hi"},
    MESSAGES: ASK | {"max_tokens": 9},
    "/v2/models/toy/generate": {"text_input": "hi"},
}
RENDERED = list(b"user: hi\nassistant: ")
CHANGING: dict[str, Any] = {
    "thinking_token_budget": 5,
    "truncation_side": "left",
    "truncate_prompt_tokens": 3,
    "bad_words": ["x"],
    "repetition_detection": {"max_pattern_size": 3},
    "logits_processors": ["x"],
    "vllm_xargs": {"x": 1},
    "use_beam_search": True,
    "spaces_between_special_tokens": False,
}


@pytest.mark.parametrize("path", [path for path in BODIES if "v2" not in path])
@pytest.mark.parametrize("name", CHANGING)
async def test_fields_that_would_change_an_answer_are_refused_by_name(frontend: Frontend, path: str, name: str) -> None:
    got = await frontend.http.post(path, json=BODIES[path] | {name: CHANGING[name]})
    assert got.status_code == 400, got.text
    assert name in got.text


@pytest.mark.parametrize("path", [RESPONSES, MESSAGES, "/v2/models/toy/generate"])
async def test_what_only_chats_and_completions_show_is_refused_elsewhere(frontend: Frontend, path: str) -> None:
    is_chat = "v2" not in path
    asks = {"return_token_ids": True, "return_tokens_as_token_ids": True, "include_reasoning": False}
    for name, value in {**asks, "add_special_tokens": is_chat}.items():
        got = await frontend.http.post(path, json=BODIES[path] | {name: value})
        assert (got.status_code, name in got.text) == (400, True), got.text
        got = await frontend.http.post(path, json=BODIES[path] | {name: not value})
        assert got.status_code == 200, got.text


@pytest.mark.parametrize("path", BODIES)
async def test_allowed_tokens_come_to_the_worker_from_every_dialect(frontend: Frontend, path: str) -> None:
    got = await frontend.http.post(path, json=BODIES[path] | {"allowed_token_ids": [104, 7, 104]})
    assert got.status_code == 200, got.text
    assert frontend.dispatcher.requests[0].sampling.allowed_tokens == token_bits([7, 104])
    for wrong in ([], [300], [-1], [1 << 40], "x", [1.5]):
        refused = await frontend.http.post(path, json=BODIES[path] | {"allowed_token_ids": wrong})
        assert (refused.status_code, "allowed_token_ids" in refused.text) == (400, True), (wrong, refused.text)


@pytest.mark.parametrize("path", BODIES)
async def test_an_empty_salt_is_refused_in_every_dialect(frontend: Frontend, path: str) -> None:
    refused = await frontend.http.post(path, json=BODIES[path] | {"cache_salt": ""})
    assert (refused.status_code, "cache_salt must not be empty" in refused.text) == (400, True)


async def test_prompt_token_ids_stand_beside_a_chats_choices_and_in_the_first_chunk_alone(frontend: Frontend) -> None:
    body = ASK | {"return_token_ids": True, "n": 2}
    whole = (await frontend.http.post(CHAT, json=body)).json()
    assert whole["prompt_token_ids"] == RENDERED
    assert [choice["token_ids"] for choice in whole["choices"]] == [list(b"hello")] * 2
    chunks = messages_of((await frontend.http.post(CHAT, json=body | {"stream": True})).content)
    assert [chunk.get("prompt_token_ids") for chunk in chunks] == [RENDERED] + [None] * (len(chunks) - 1)


@pytest.mark.parametrize("echo", [False, True])
async def test_prompt_token_ids_stand_in_each_choice_of_a_completion(frontend: Frontend, echo: bool) -> None:
    body = {"prompt": [[97], [98, 99]], "return_token_ids": True, "n": 2, "echo": echo}
    whole = (await frontend.http.post(TEXT, json=body)).json()
    assert [choice["prompt_token_ids"] for choice in whole["choices"]] == [[97], [97], [98, 99], [98, 99]]
    chunks = messages_of((await frontend.http.post(TEXT, json=body | {"stream": True})).content)
    firsts: dict[int, Any] = {}
    for chunk in chunks:
        (choice,) = chunk["choices"]
        shown = choice.get("prompt_token_ids")
        assert (shown is not None) == (choice["index"] not in firsts)
        firsts.setdefault(choice["index"], shown)
    assert firsts == {0: [97], 1: [97], 2: [98, 99], 3: [98, 99]}


def named_logprobs(frontend: Frontend) -> None:
    frontend.dispatcher.script = lambda request, index: [SampledToken(104, -0.5, ((7, -1.0), (8, -2.0)))]


async def test_logprobs_name_tokens_by_their_ids_where_that_is_wanted(frontend: Frontend) -> None:
    named_logprobs(frontend)
    wanted = {"return_tokens_as_token_ids": True, "logprob_token_ids": [7, 8, 7]}
    chat = (await frontend.http.post(CHAT, json=ASK | wanted | {"logprobs": True})).json()
    (entry,) = chat["choices"][0]["logprobs"]["content"]
    assert (entry["token"], entry["bytes"]) == ("token_id:104", [104])
    assert [(top["token"], top["logprob"]) for top in entry["top_logprobs"]] == [("token_id:7", -1), ("token_id:8", -2)]
    assert frontend.dispatcher.requests[0].sampling.logprob_token_ids == (7, 8)
    got = await frontend.http.post(TEXT, json={"prompt": "ab", "echo": True, "logprobs": 0} | wanted)
    logprobs = got.json()["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["token_id:97", "token_id:98", "token_id:104"]
    assert logprobs["text_offset"] == [0, 1, 2]
    assert logprobs["top_logprobs"][-1] == {"token_id:7": -1, "token_id:8": -2, "token_id:104": -0.5}


async def test_kserve_knows_no_rank_of_tokens_that_a_client_names(frontend: Frontend) -> None:
    named_logprobs(frontend)
    for wanted, ranks in (({}, [None, 1, 2]), ({"logprob_token_ids": [7, 8]}, [None, None, None])):
        body = {"text_input": "hi", "return_logprobs": True, "logprobs": 2} | wanted
        (entries,) = json.loads((await frontend.http.post("/v2/models/toy/generate", json=body)).json()["logprobs"])
        assert [entries[token]["rank"] for token in ("104", "7", "8")] == ranks


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.path)
def test_a_body_with_logprobs_of_named_tokens_is_made_apart_from_the_event_loop(dialect: Dialect) -> None:
    paths = {CHAT: {"logprobs": True}, TEXT: {"logprobs": 0}, RESPONSES: {"include": ["message.output_text.logprobs"]}}
    if dialect.path == MESSAGES:
        return  # it has no logprobs
    named = {"logprob_token_ids": list(range(100))}
    if dialect.path in paths:
        request: Any = dialect.parse(BODIES[dialect.path] | paths[dialect.path] | named)
    else:
        request = parse_generate({"text_input": "hi", "parameters": named, "return_logprobs": True})
    point = StreamPoint.begin("r", 1)
    reply = dialect.reply(request, point, "toy", ByteText(), SentProgress(point))
    for _ in range(20):
        reply.add(TextEvent(0, "a", 2, 1, SampledToken(97, -1.0, tuple((token, -2.0) for token in range(100)))))
    assert reply.is_long


async def test_messages_have_no_logprobs_and_none_are_computed_for_them(frontend: Frontend) -> None:
    got = await frontend.http.post(MESSAGES, json=BODIES[MESSAGES] | {"prompt_logprobs": 5, "logprobs": 5})
    assert got.status_code == 200, got.text
    params = frontend.dispatcher.requests[0].sampling
    assert (params.prompt_logprobs, params.logprobs) == (None, None)


async def test_named_logprobs_need_logprobs_and_have_a_limit(frontend: Frontend) -> None:
    for body in ({"logprob_token_ids": [1]}, {"logprobs": 0, "logprob_token_ids": list(range(129))}):
        got = await frontend.http.post(TEXT, json={"prompt": "a"} | body)
        assert (got.status_code, got.json()["error"]["param"]) == (400, "logprob_token_ids")


async def test_reasoning_is_left_out_where_it_is_not_wanted() -> None:
    async with client(THOUGHT + "Sunny.") as (_, http):
        for wanted in (True, False):
            body = ASK | {"include_reasoning": wanted}
            message = (await http.post(CHAT, json=body)).json()["choices"][0]["message"]
            assert (message["content"].strip(), "reasoning" in message) == ("Sunny.", wanted)
            got = await http.post(CHAT, json=body | {"stream": True})
            deltas = [chunk["choices"][0]["delta"] for chunk in messages_of(got.content)]
            assert any("reasoning" in delta for delta in deltas) == wanted
            assert wanted or all(deltas[:-1]), "no empty chunk stands for what is left out"


async def test_usage_in_every_chunk_says_what_was_cached(frontend: Frontend) -> None:
    usage = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    for path in (CHAT, TEXT):
        chunks = messages_of((await frontend.http.post(path, json=BODIES[path] | usage)).content)
        assert {chunk["usage"]["prompt_tokens_details"]["cached_tokens"] for chunk in chunks} == {3}


async def test_special_tokens_before_a_prompt_can_be_left_out() -> None:
    class Text(ByteText):
        def encode(self, text: str, *, add_special_tokens: bool = True, **_: object) -> array[int]:
            return array("I", [*([299] if add_special_tokens else []), *text.encode()])

    for kind in (TEXT, "tokenize"):
        for sent, first in ((b"", 299), (b', "add_special_tokens": false', 97), (b', "add_special_tokens": true', 299)):
            outcome = prepare(Work(kind, b'{"prompt": "a"' + sent + b"}", "toy", FACTS), Text())
            ids = outcome.value.prompts[0].ids if kind == TEXT else outcome.value
            assert ids[0] == first if kind == TEXT else b'"tokens":[%d' % first in ids


async def test_a_template_of_the_clients_is_refused_where_tokens_are_counted(frontend: Frontend) -> None:
    for field in ({"chat_template": "x"}, {"add_special_tokens": True}, {"documents": [{"text": "x"}]}):
        got = await frontend.http.post("/tokenize", json=ASK | field)
        assert (got.status_code, got.json()["error"]["param"]) == (400, next(iter(field)))


def test_how_much_to_reason_comes_to_the_template() -> None:
    for effort, variables in (
        ("high", {"reasoning_effort": "high"}),
        ("none", {"reasoning_effort": "none", "enable_thinking": False}),
    ):
        for kwargs in ({}, {"enable_thinking": True}):
            body = ASK | {"reasoning_effort": effort, "chat_template_kwargs": kwargs}
            (prompt,) = parse_chat(body).prompts
            assert isinstance(prompt, ChatPrompt)
            assert prompt.variables == variables | kwargs


@pytest.mark.parametrize("name", ["thinking_token_budget", "truncation_side", "repetition_detection"])
async def test_parameters_of_kserve_that_would_change_an_answer_are_refused_by_name(
    frontend: Frontend, name: str
) -> None:
    for field in ({name: CHANGING[name]}, {"parameters": {name: CHANGING[name]}}):
        got = await frontend.http.post("/v2/models/toy/generate", json={"text_input": "hi"} | field)
        assert (got.status_code, name in got.text) == (400, True)
