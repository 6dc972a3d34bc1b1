"""The HTTP door, seen by the openai package and by plain HTTP clients."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from openai import OpenAI

from router.endpoints.app import build_http_app
from router.metrics import RouterMetrics
from router.requests.client_request import AnswerRequest
from router.requests.request_handler import RequestHandler
from router.text.tokenizer import ByteText
from tests.inline_preparer import InlinePreparer
from twostroke import __version__
from twostroke.kv_cache.block import owner_salt
from twostroke.models.catalog.recommended import Recommended
from twostroke.request import FinishReason, SampledToken

ASK = [{"role": "user", "content": "hi"}]
TEXT = "/v1/completions"


def tokens(text: str) -> list[SampledToken]:
    return [SampledToken(byte) for byte in text.encode()]


def sampled(frontend, name: str) -> float:
    return frontend.metrics.registry.get_sample_value(name, {"role": "router"})


async def test_a_chat_has_text_usage_and_finish_reason(frontend):
    answer = await frontend.openai.chat.completions.create(model="toy", messages=ASK)
    assert answer.choices[0].message.content == "hello"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "length"
    prompt_tokens = len(frontend.dispatcher.requests[0].prompt)
    assert answer.usage.prompt_tokens == prompt_tokens
    assert answer.usage.completion_tokens == 5
    assert answer.usage.total_tokens == prompt_tokens + 5
    assert answer.usage.prompt_tokens_details.cached_tokens == 3
    assert answer.id.startswith("chatcmpl-")


async def test_the_synchronous_client_streams_as_well(frontend):
    def ask() -> str:
        with OpenAI(base_url=f"{frontend.url}/v1", api_key="none", max_retries=0) as client:
            stream = client.chat.completions.create(model="toy", messages=ASK, stream=True)
            return "".join(chunk.choices[0].delta.content or "" for chunk in stream)

    assert await asyncio.to_thread(ask) == "hello"


async def test_every_token_of_a_stream_is_its_own_event(frontend):
    stream = await frontend.openai.chat.completions.create(
        model="toy", messages=ASK, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].delta.content for chunk in chunks[1:6]] == list("hello")
    assert chunks[6].choices[0].finish_reason == "length"
    assert all(chunk.usage is None for chunk in chunks[:7])
    assert chunks[7].choices == []
    assert chunks[7].usage.prompt_tokens_details.cached_tokens == 3
    assert len(chunks) == 8


async def test_a_stream_ends_with_done(frontend):
    answer = await frontend.http.post("/v1/completions", json={"prompt": "a", "stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.text.endswith("data: [DONE]\n\n")


async def test_half_characters_are_never_sent_and_all_text_arrives(frontend):
    frontend.dispatcher.script = lambda request, index: tokens("a€😀ü")
    stream = await frontend.openai.completions.create(model="toy", prompt="x", stream=True)
    texts = [chunk.choices[0].text async for chunk in stream]
    assert texts == ["a", "€", "😀", "ü", ""]


async def test_an_answer_cut_in_the_middle_of_a_character_shows_the_break(frontend):
    frontend.dispatcher.script = lambda request, index: tokens("a€")[:-1]
    answer = await frontend.openai.completions.create(model="toy", prompt="x")
    assert answer.choices[0].text == "a\ufffd"


async def test_a_stop_string_over_several_tokens_ends_the_answer_and_the_worker_is_told(frontend):
    frontend.dispatcher.script = lambda request, index: tokens("one STOP two")
    answer = await frontend.openai.chat.completions.create(model="toy", messages=ASK, stop=["STOP", "zzz"])
    assert answer.choices[0].message.content == "one "
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens == len("one STOP")
    assert frontend.dispatcher.early == [(frontend.dispatcher.parents[0].request_id, 0)]


async def test_a_stop_string_can_be_kept(frontend):
    frontend.dispatcher.script = lambda request, index: tokens("one STOP two")
    answer = await frontend.openai.completions.create(
        model="toy", prompt="x", stop="STOP", extra_body={"include_stop_str_in_output": True}
    )
    assert answer.choices[0].text == "one STOP"


async def test_a_stop_string_does_not_count_before_min_tokens(frontend):
    frontend.dispatcher.script = lambda request, index: tokens("..a..b")
    answer = await frontend.openai.completions.create(
        model="toy", prompt="x", stop="..", max_tokens=6, extra_body={"min_tokens": 3}
    )
    assert answer.choices[0].text == "..a"


async def test_text_held_back_for_a_stop_string_arrives_when_the_answer_ends(frontend):
    frontend.dispatcher.script = lambda request, index: tokens("one ST")
    stream = await frontend.openai.completions.create(model="toy", prompt="x", stop="STOP", stream=True)
    texts = [chunk.choices[0].text async for chunk in stream]
    assert texts == ["o", "n", "e", " ", "ST"]


async def test_the_text_of_a_stop_token_is_left_out(frontend):
    frontend.dispatcher.script = lambda request, index: tokens("ab!")
    frontend.dispatcher.reason = FinishReason.STOP
    body = {"stop_token_ids": [ord("!")]}
    answer = await frontend.openai.completions.create(model="toy", prompt="x", extra_body=body)
    assert (answer.choices[0].text, answer.usage.completion_tokens) == ("ab", 3)
    answer = await frontend.openai.completions.create(
        model="toy", prompt="x", extra_body={**body, "include_stop_str_in_output": True}
    )
    assert answer.choices[0].text == "ab!"


async def test_the_text_of_the_end_of_sequence_token_is_left_out_unless_it_ends_nothing(frontend):
    frontend.dispatcher.script = lambda request, index: [*tokens("ab"), SampledToken(299)]
    frontend.dispatcher.reason = FinishReason.STOP
    answer = await frontend.openai.completions.create(model="toy", prompt="x")
    assert (answer.choices[0].text, answer.usage.completion_tokens) == ("ab", 3)
    answer = await frontend.openai.completions.create(model="toy", prompt="x", extra_body={"ignore_eos": True})
    assert answer.choices[0].text == "ab<299>"


async def test_several_choices_stop_one_by_one(frontend):
    frontend.dispatcher.script = lambda request, index: tokens(["ab|cd", "abcdef", "|"][index])
    answer = await frontend.openai.completions.create(model="toy", prompt="x", n=3, stop="|")
    assert [choice.text for choice in answer.choices] == ["ab", "abcdef", ""]
    assert [choice.finish_reason for choice in answer.choices] == ["stop", "length", "stop"]
    (parent,) = frontend.dispatcher.parents
    samplings = [parent.request.of_choice(choice).sampling for choice in range(parent.n)]
    assert len({sampling.seed for sampling in samplings}) == 1
    assert [sampling.choice for sampling in samplings] == [0, 1, 2]


async def test_a_list_of_prompts_has_a_set_of_choices_for_each(frontend):
    frontend.dispatcher.script = lambda request, index: tokens(bytes(request.prompt).decode() + str(index))
    answer = await frontend.openai.completions.create(model="toy", prompt=["a", "b"], n=2)
    assert [choice.text for choice in answer.choices] == ["a0", "a1", "b0", "b1"]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.usage.prompt_tokens == 2
    assert answer.usage.prompt_tokens_details.cached_tokens == 6


@pytest.mark.parametrize("prompt", [[97, 98], [[97, 98]]])
async def test_prompts_may_be_token_ids(frontend, prompt):
    await frontend.openai.completions.create(model="toy", prompt=prompt)
    assert frontend.dispatcher.requests[0].prompt == (97, 98)


async def test_a_chat_without_max_tokens_may_take_what_fits_and_a_completion_sixteen(frontend):
    await frontend.openai.chat.completions.create(model="toy", messages=ASK)
    await frontend.openai.completions.create(model="toy", prompt="abc")
    chat, completion = frontend.dispatcher.requests
    assert chat.sampling.max_tokens == 256 - len(chat.prompt)
    assert completion.sampling.max_tokens == 16


async def test_sampling_fields_reach_the_worker(frontend):
    await frontend.openai.completions.create(
        model="toy",
        prompt="abc",
        temperature=0.5,
        top_p=0.9,
        presence_penalty=1,
        frequency_penalty=-1,
        seed=-1,
        logit_bias={"5": 3},
        extra_body={"top_k": 7, "min_p": 0.1, "repetition_penalty": 1.5, "ignore_eos": True, "cache_salt": "tenant"},
    )
    request = frontend.dispatcher.requests[0]
    params = request.sampling
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.9, 7, 0.1)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (1, -1, 1.5)
    assert params.seed == 2**64 - 1
    assert params.logit_bias == ((5, 3.0),)
    assert params.ignore_eos
    assert request.salt == owner_salt("", b"tenant")


async def test_a_top_k_past_the_vocabulary_is_the_vocabulary(frontend):
    for top_k in (300, 2**40, 1e300):
        await frontend.http.post("/v1/completions", json={"prompt": "abc", "top_k": top_k})
    assert [request.sampling.top_k for request in frontend.dispatcher.requests] == [300, 300, 300]


@pytest.mark.parametrize("seed", [-(2**63), 2**63 - 1, 7.0])
async def test_seeds_are_signed_numbers_of_64_bits(frontend, seed):
    assert (await frontend.http.post(TEXT, json={"prompt": "a", "seed": seed})).status_code == 200
    assert frontend.dispatcher.requests[0].sampling.seed == seed % 2**64


@pytest.mark.parametrize(("seed", "kind"), [(-(2**63) - 1, "greater_than_equal"), (2**63, "less_than_equal")])
async def test_seeds_beyond_64_bits_are_refused_as_vllm_refuses_them(frontend, seed, kind):
    for path, body in (
        (TEXT, {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": ASK}),
        ("/v1/responses", {"input": "a"}),
    ):
        error = (await frontend.http.post(path, json=body | {"seed": seed})).json()["error"]
        assert (error["param"], kind in error["message"]) == ("seed", True)


async def test_requests_without_a_seed_get_different_ones(frontend):
    for _ in range(2):
        await frontend.openai.completions.create(model="toy", prompt="abc")
    first, second = frontend.dispatcher.requests
    assert first.sampling.seed != second.sampling.seed


def with_logprobs(request, index):
    return [SampledToken(97, -0.5, ((97, -0.5), (98, -1.0))), SampledToken(0xE2, float("-inf"), ((97, -2.0),))]


async def test_chat_logprobs_have_tokens_bytes_and_alternatives(frontend):
    frontend.dispatcher.script = with_logprobs
    answer = await frontend.openai.chat.completions.create(model="toy", messages=ASK, logprobs=True, top_logprobs=2)
    first, second = answer.choices[0].logprobs.content
    assert (first.token, first.logprob, first.bytes) == ("a", -0.5, [97])
    assert [(top.token, top.logprob) for top in first.top_logprobs] == [("a", -0.5), ("b", -1.0)]
    assert (second.token, second.logprob, second.bytes) == ("\ufffd", -9999.0, [0xE2])


async def test_completion_logprobs_come_as_columns(frontend):
    frontend.dispatcher.script = with_logprobs
    answer = await frontend.openai.completions.create(model="toy", prompt="x", logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert logprobs.tokens == ["a", "\ufffd"]
    assert logprobs.token_logprobs == [-0.5, -9999.0]
    assert logprobs.top_logprobs[0] == {"a": -0.5, "b": -1.0}
    assert logprobs.text_offset == [0, 1]
    stream = await frontend.openai.completions.create(model="toy", prompt="x", logprobs=2, stream=True)
    offsets = [chunk.choices[0].logprobs.text_offset async for chunk in stream if chunk.choices[0].logprobs]
    assert offsets == [[0], [1]]


async def test_token_ids_come_back_when_asked_for(frontend):
    body = {"prompt": "a", "return_token_ids": True}
    answer = (await frontend.http.post("/v1/completions", json=body)).json()
    assert answer["choices"][0]["token_ids"] == list(b"hello")


async def test_a_continued_message_is_not_closed(frontend):
    messages = [*ASK, {"role": "assistant", "content": "The answer"}]
    await frontend.openai.chat.completions.create(
        model="toy", messages=messages, extra_body={"continue_final_message": True}
    )
    assert bytes(frontend.dispatcher.requests[0].prompt).endswith(b"assistant: The answer")


async def test_parts_of_text_make_one_message(frontend):
    content = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    await frontend.openai.chat.completions.create(model="toy", messages=[{"role": "user", "content": content}])
    assert b"one\ntwo" in bytes(frontend.dispatcher.requests[0].prompt)


async def test_the_request_id_of_the_client_comes_back_and_names_the_request(frontend):
    answer = await frontend.http.post(TEXT, json={"prompt": "a"}, headers={"x-request-id": "mine-1"})
    assert answer.headers["x-request-id"] == "mine-1"
    assert answer.json()["id"] == "cmpl-mine-1"
    assert frontend.dispatcher.parents[0].request_id.startswith("mine-1~")
    drawn = await frontend.http.get("/live")
    assert drawn.headers["x-request-id"]
    refused = await frontend.http.get("/live", headers={"x-request-id": "x" * 300})
    assert refused.status_code == 400


async def test_two_open_requests_with_one_id_are_told_apart(frontend):
    frontend.dispatcher.stalls = True
    asks = [
        asyncio.create_task(frontend.http.post(TEXT, json={"prompt": "a"}, headers={"x-request-id": "same"}))
        for _ in range(2)
    ]
    await frontend.dispatcher.two_open.wait()
    for ask in asks:
        ask.cancel()
    await frontend.dispatcher.all_closed.wait()
    assert len({each.request_id for each in frontend.dispatcher.parents}) == 2


async def test_the_id_a_client_gave_means_another_request_at_the_workers_of_every_router(app):
    dispatcher, _ = app
    for _ in range(2):
        handler = RequestHandler(dispatcher, InlinePreparer(ByteText()), RouterMetrics(), model="toy")
        transport = httpx.ASGITransport(build_http_app(handler, max_body_bytes=1 << 16))
        async with httpx.AsyncClient(transport=transport, base_url="http://toy") as http:
            body, headers = {"prompt": ["a", "b"]}, {"x-request-id": "same"}
            assert (await http.post(TEXT, json=body, headers=headers)).status_code == 200
    assert len({each.request_id for each in dispatcher.parents}) == 4


async def test_models_are_listed(frontend):
    models = await frontend.openai.models.list()
    assert [model.id for model in models.data] == ["toy"]
    assert (await frontend.openai.models.retrieve("toy")).id == "toy"


async def test_what_the_models_makers_recommend_is_told(app):
    dispatcher, _ = app
    handler = RequestHandler(
        dispatcher, InlinePreparer(ByteText()), RouterMetrics(), model="toy", recommended=Recommended(top_p=0.9)
    )
    transport = httpx.ASGITransport(build_http_app(handler, max_body_bytes=1 << 16))
    async with httpx.AsyncClient(transport=transport, base_url="http://toy") as http:
        (card,) = (await http.get("/v1/models")).json()["data"]
    assert card["recommended_sampling"] == {"top_p": 0.9}


async def test_text_can_be_tokenized_and_back(frontend):
    answer = await frontend.http.post("/tokenize", json={"prompt": "hé", "return_token_strs": True})
    assert answer.json()["tokens"] == list("hé".encode())
    assert answer.json()["count"] == 3
    assert answer.json()["max_model_len"] == 256
    back = await frontend.http.post("/detokenize", json={"tokens": answer.json()["tokens"]})
    assert back.json() == {"prompt": "hé"}
    chat = await frontend.http.post("/tokenize", json={"messages": ASK})
    assert bytes(chat.json()["tokens"]).startswith(b"user: hi")
    for tokens in ([300], [7] * 257):
        assert (await frontend.http.post("/detokenize", json={"tokens": tokens})).status_code == 400


async def test_health_follows_the_workers_and_draining(frontend):
    assert (await frontend.http.get("/health")).status_code == 200
    facts, frontend.dispatcher.facts_now = frontend.dispatcher.facts_now, None
    for path, status in (("/health", 503), ("/ready", 503), ("/live", 200)):
        assert (await frontend.http.get(path)).status_code == status
    refused = await frontend.http.post(TEXT, json={"prompt": "a"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "peer_lost")
    frontend.dispatcher.facts_now = facts
    frontend.dispatcher.is_draining = True
    assert (await frontend.http.get("/health")).status_code == 503
    refused = await frontend.http.post(TEXT, json={"prompt": "a"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")


async def test_paths_and_methods_that_are_not_there_are_refused_in_the_same_form(frontend):
    assert (await frontend.http.get("/nothing")).json()["error"]["type"] == "invalid_request_error"
    wrong = await frontend.http.get(TEXT)
    assert wrong.status_code == 405
    assert "error" in wrong.json()


async def test_metrics_count_what_was_sent(frontend):
    await frontend.openai.completions.create(model="toy", prompt="abcd")
    assert sampled(frontend, "twostroke_prompt_tokens_total") == 4
    assert sampled(frontend, "twostroke_generation_tokens_total") == 5
    assert sampled(frontend, "twostroke_cached_tokens_total") == 3
    assert sampled(frontend, "twostroke_ttft_seconds_count") == 1
    assert sampled(frontend, "twostroke_inter_token_latency_seconds_count") == 4
    assert sampled(frontend, "twostroke_open_requests") == 0
    shown = (await frontend.http.get("/metrics")).text
    assert 'twostroke_requests_total{role="router",status="ok"} 1.0' in shown


async def test_a_bug_behind_the_door_is_a_500_that_does_not_stop_the_server(frontend):
    def broken(request, index):
        raise KeyError("oops")

    frontend.dispatcher.script = broken
    answer = await frontend.http.post(TEXT, json={"prompt": "a"})
    assert answer.status_code == 500
    assert answer.json()["error"]["type"] == "server_error"
    assert (await frontend.http.get("/live")).status_code == 200


async def test_it_says_its_version_and_which_pages_there_are(frontend):
    assert (await frontend.http.get("/version")).json() == {"version": __version__}
    index = await frontend.http.get("/")
    assert index.headers["content-type"].startswith("text/plain")
    for path in ("/v1/chat/completions", "/v1/models", "/metrics", "/health", "/version"):
        assert path in index.text
        assert (await frontend.http.get(path)).status_code != 404


async def test_all_prompts_are_looked_at_once_and_not_for_each_choice(frontend, monkeypatch):
    asked, has_parts = [], AnswerRequest.has_parts
    monkeypatch.setattr(AnswerRequest, "has_parts", property(lambda body: asked.append(body) or has_parts.fget(body)))
    answer = await frontend.openai.completions.create(model="toy", prompt=["a"] * 40)
    assert len(answer.choices) == 40
    assert len(asked) < 5
