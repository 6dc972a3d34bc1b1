"""`generate` and `generate_stream` of KServe's protocol over HTTP, and what the server says of itself."""

from __future__ import annotations

import json

import pytest

from twostroke.base.errors import Overloaded, PeerLost
from twostroke.request import FinishReason, SampledToken

GENERATE, STREAM = "/v2/models/toy/generate", "/v2/models/toy/generate_stream"


def events_of(answer) -> list[dict]:
    *messages, rest = answer.text.split("\n\n")
    assert rest == ""
    assert all(message.startswith("data: ") for message in messages)
    return [json.loads(message.removeprefix("data: ")) for message in messages]


async def test_a_whole_answer_is_text_and_the_models_name(app):
    _, http = app
    for path in (GENERATE, "/v2/models/toy/versions/1/generate"):
        answer = await http.post(path, json={"text_input": "abc"})
        assert answer.status_code == 200
        assert answer.json() == {"model_name": "toy", "model_version": "1", "text_output": "hello"}


async def test_a_stream_has_an_event_for_every_token_and_one_for_the_end(app):
    _, http = app
    answer = await http.post(STREAM, json={"text_input": "abc", "id": "mine"})
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    events = events_of(answer)
    assert [event["text_output"] for event in events] == [*"hello", ""]
    assert {event["id"] for event in events} == {"mine"}


async def test_details_say_how_the_answer_ended_and_what_each_token_was(app):
    dispatcher, http = app
    dispatcher.script = lambda request, index: [SampledToken(97, -0.5), SampledToken(299, -1.0)]
    dispatcher.reason = FinishReason.STOP
    body = {"text_input": "abc", "parameters": {"details": True}}
    details = (await http.post(GENERATE, json=body)).json()["details"]
    assert details["finish_reason"] == "eos_token"
    assert (details["prompt_tokens"], details["completion_tokens"], details["cached_tokens"]) == (3, 2, 3)
    tokens = [
        {"id": 97, "text": "a", "logprob": -0.5, "special": False},
        {"id": 299, "text": "<299>", "logprob": -1.0, "special": True},
    ]
    assert details["logprobs"] == tokens
    events = events_of(await http.post(STREAM, json=body))
    assert [event.get("token") for event in events] == [*tokens, None]
    assert [event.get("details", {}).get("finish_reason") for event in events] == [None, None, "eos_token"]
    assert events[-1]["details"]["token"] == tokens[-1]


async def test_a_stop_string_is_another_reason_than_the_models_own_end(app):
    dispatcher, http = app
    dispatcher.script = lambda request, index: [SampledToken(byte) for byte in b"ab|cd"]
    body = {"text_input": "abc", "parameters": {"details": True, "stop": ["|"]}}
    answer = (await http.post(GENERATE, json=body)).json()
    assert (answer["text_output"], answer["details"]["finish_reason"]) == ("ab", "stop_sequence")
    dispatcher.script = lambda request, index: [SampledToken(byte) for byte in b"abcd"]
    body["parameters"]["max_tokens"] = 2
    answer = (await http.post(GENERATE, json=body)).json()
    assert (answer["text_output"], answer["details"]["finish_reason"]) == ("ab", "length")


@pytest.mark.parametrize("as_text", [False, True])
async def test_sampling_parameters_reach_the_worker_also_as_text(app, as_text):
    dispatcher, http = app
    sampling = {
        "temperature": 0.5,
        "top_k": 7,
        "top_p": 0.9,
        "min_p": 0.1,
        "seed": 5,
        "max_tokens": 8,
        "min_tokens": 2,
        "ignore_eos": True,
        "presence_penalty": 0.25,
        "repetition_penalty": 1.5,
        "stop_token_ids": [9],
        "logit_bias": {"5": 3.0},
    }
    if as_text:
        sampling = {name: json.dumps(value) for name, value in sampling.items()}
    for body in ({"parameters": sampling}, {"sampling_parameters": json.dumps(sampling)}):
        answer = await http.post(GENERATE, json={"text_input": "abc", **body})
        assert answer.status_code == 200, answer.text
        params = dispatcher.requests.pop().sampling
        assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.5, 7, 0.9, 0.1)
        assert (params.seed, params.max_tokens, params.min_tokens, params.ignore_eos) == (5, 8, 2, True)
        assert (params.presence_penalty, params.repetition_penalty) == (0.25, 1.5)
        assert (params.stop_token_ids, params.logit_bias) == ((9,), ((5, 3.0),))


async def test_the_vllm_backends_dialect_has_the_prompt_before_a_whole_answer_and_its_flags(app):
    dispatcher, http = app
    dispatcher.script = lambda request, index: [SampledToken(97, -0.5, ((98, -0.25), (97, -0.5)))]
    flags = {f"return_{name}": True for name in ("finish_reason", "num_input_tokens", "num_output_tokens")}
    body = {"text_input": "abc", "stream": False, "sampling_parameters": '{"logprobs": "2"}', **flags}
    body |= {"return_cumulative_logprob": True, "return_logprobs": True}
    answer = (await http.post(GENERATE, json=body)).json()
    assert answer["text_output"] == "abca"
    assert (answer["finish_reason"], answer["num_input_tokens"], answer["num_output_tokens"]) == ("length", 3, 1)
    assert answer["cumulative_logprob"] == -0.5
    assert json.loads(answer["logprobs"]) == [
        {
            "97": {"logprob": -0.5, "rank": 2, "decoded_token": "a"},
            "98": {"logprob": -0.25, "rank": 1, "decoded_token": "b"},
        }
    ]
    answer = (await http.post(GENERATE, json={**body, "exclude_input_in_output": True})).json()
    assert answer["text_output"] == "a"
    events = events_of(await http.post(STREAM, json={**body, "stream": True}))
    assert [event["text_output"] for event in events] == ["a", ""]
    assert [event["finish_reason"] for event in events] == ["None", "length"]
    assert [event["num_output_tokens"] for event in events] == [1, 0]


@pytest.mark.parametrize(
    "wanted",
    [
        {"structured_outputs": {"choice": ["yes", "no"]}},
        {"guided_decoding": '{"choice": ["yes", "no"]}'},
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": '{"json": {"type": "object"}}'},
    ],
)
async def test_output_is_structured_as_vllms_names_of_today_and_before_say(app, wanted):
    dispatcher, http = app
    for body in ({"parameters": wanted}, {"sampling_parameters": json.dumps(wanted)}):
        answer = await http.post(GENERATE, json={"text_input": "abc", **body})
        assert answer.status_code == 200, answer.text
        assert dispatcher.requests.pop().sampling.grammar is not None
    wrong = {"text_input": "abc", "parameters": {"structured_outputs": {"regex": "["}}}
    assert (await http.post(GENERATE, json=wrong)).status_code == 400


async def test_several_choices_are_a_list(app):
    dispatcher, http = app
    dispatcher.script = lambda request, index: [SampledToken(byte) for byte in (b"ab", b"cd")[index]]
    answer = await http.post(GENERATE, json={"text_input": "abc", "parameters": {"n": "2"}})
    assert answer.json()["text_output"] == ["ab", "cd"]


async def test_who_asks_is_known_by_the_same_fields_as_elsewhere(app):
    dispatcher, http = app
    parameters = {"priority": 3, "cache_salt": "mine", "timeout": 5_000_000, "user": "jo", "other": {"a": 1}}
    answer = await http.post(GENERATE, json={"text_input": "abc", "parameters": parameters})
    assert answer.status_code == 200
    (parent,) = dispatcher.parents
    assert (parent.routing.priority, parent.routing.tenant) == (-3, "127.0.0.1")
    assert parent.request.deadline_s is not None


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "text_input"),
        ({"text_input": 7}, "text_input"),
        ({"text_input": ["a"]}, "text_input"),
        ({"text_input": ""}, "prompt"),
        ({"text_input": "a\ud800"}, "text_input"),
        ({"text_input": "a", "image": "x"}, "image"),
        ({"text_input": "a", "text_output": "x"}, "text_output"),
        ({"text_input": "a", "stream": True}, "stream"),
        ({"text_input": "a", "streaming": True}, "streaming"),
        ({"text_input": "a", "stream": "perhaps"}, "stream"),
        ({"text_input": "a", "id": 7}, "id"),
        ({"text_input": "a", "id": "\n"}, "id"),
        ({"text_input": "a", "sampling_parameters": "{"}, "sampling_parameters"),
        ({"text_input": "a", "sampling_parameters": "[]"}, "sampling_parameters"),
        ({"text_input": "a", "sampling_parameters": '{"temprature": 1}'}, "temprature"),
        ({"text_input": "a", "sampling_parameters": '{"cache_salt": "\\ud800"}'}, "sampling_parameters.cache_salt"),
        ({"text_input": "a", "sampling_parameters": "[" * 3000}, "sampling_parameters"),
        ({"text_input": "a", "parameters": 7}, "parameters"),
        ({"text_input": "a", "parameters": {"max_tokens": "many"}}, "max_tokens"),
        ({"text_input": "a", "parameters": {"max_tokens": "1" * 5000}}, "max_tokens"),
        ({"text_input": "a", "parameters": {"max_tokens": 256}}, "max_tokens"),
        ({"text_input": "a", "parameters": {"temperature": "nan"}}, "temperature"),
        ({"text_input": "a", "parameters": {"temperature": -1}}, "temperature"),
        ({"text_input": "a", "parameters": {"stop_token_ids": "[9"}}, "stop_token_ids"),
        ({"text_input": "a", "parameters": {"logit_bias": "7"}}, "logit_bias"),
        ({"text_input": "a", "parameters": {"timeout": -1}}, "timeout"),
        ({"text_input": "a", "parameters": {"timeout": 10**400}}, "timeout"),
        ({"text_input": "a", "parameters": {"use_beam_search": True}}, "use_beam_search"),
        ({"text_input": "a", "parameters": {"suffix": "b"}}, "suffix"),
        ({"text_input": "a", "parameters": {"max_new_tokens": 5}}, "max_new_tokens"),
        ({"text_input": "a", "parameters": {"best_of": 2}}, "best_of"),
        ({"text_input": "a", "parameters": {"guided_json": {}}}, "guided_json"),
        ({"text_input": "a", "parameters": {"sequence_id": 5}}, "sequence_id"),
        ({"text_input": "a", "parameters": {"lora_name": "mine"}}, "lora_name"),
        ({"text_input": "a", "parameters": {"n": 2, "details": True}}, "n"),
    ],
)
async def test_what_is_wrong_is_named_in_one_line(app, body, field):
    dispatcher, http = app
    answer = await http.post(GENERATE, content=json.dumps(body), headers={"content-type": "application/json"})
    assert answer.status_code == 400, answer.text
    (message,) = answer.json().values()
    assert field in message
    assert "\n" not in message
    assert dispatcher.requests == []


async def test_fields_that_ask_for_nothing_pass(app):
    _, http = app
    parameters = {"best_of": 1, "use_beam_search": "false", "sequence_id": 0, "temperature": None, "top_k": -1}
    answer = await http.post(GENERATE, json={"text_input": "a", "parameters": parameters, "stream": None})
    assert answer.status_code == 200, answer.text


async def test_a_stream_cannot_begin_with_its_prompt_or_have_choices(app):
    _, http = app
    for wrong in ({"exclude_input_in_output": False}, {"parameters": {"n": 2}}):
        assert (await http.post(STREAM, json={"text_input": "a", **wrong})).status_code == 400


async def test_other_models_and_versions_are_not_found(app):
    _, http = app
    for path in ("/v2/models/other/generate", "/v2/models/toy/versions/2/generate", "/v2/models/toy/embed"):
        answer = await http.post(path, json={"text_input": "a"})
        assert answer.status_code in (404, 405)
        assert list(answer.json()) == ["error"]
    for path in ("/v2/models/other", "/v2/models/other/ready", "/v2/models/toy/versions/7/config"):
        assert (await http.get(path)).status_code == 404


async def test_failures_have_the_protocols_form_before_and_in_a_stream(app):
    dispatcher, http = app
    dispatcher.failure = Overloaded("full", retry_after_s=2.0)
    answer = await http.post(STREAM, json={"text_input": "a"})
    assert (answer.status_code, answer.json(), answer.headers["retry-after"]) == (429, {"error": "full"}, "2")
    dispatcher.failure, dispatcher.failure_after = PeerLost("gone"), 2
    events = events_of(await http.post(STREAM, json={"text_input": "a"}))
    assert [event.get("text_output") for event in events] == ["h", "e", None]
    assert events[-1] == {"error": "gone"}


async def test_the_server_and_its_model_are_described(app):
    dispatcher, http = app
    assert (await http.get("/v2/health/live")).json() == {"live": True}
    assert (await http.get("/v2/health/ready")).json() == {"ready": True}
    server = (await http.get("/v2")).json()
    assert server["name"] == "twostroke"
    assert "generate" in server["extensions"]
    model = (await http.get("/v2/models/toy/versions/1")).json()
    assert (model["name"], model["versions"]) == ("toy", ["1"])
    assert model["inputs"][0] == {"name": "text_input", "datatype": "BYTES", "shape": [1]}
    config = (await http.get("/v2/models/toy/config")).json()
    assert config["model_transaction_policy"] == {"decoupled": True}
    assert config["max_batch_size"] == 0
    assert config["input"][0] == {"name": "text_input", "data_type": "TYPE_STRING", "dims": [1], "optional": False}
    assert (await http.get("/v2/models/toy/ready")).json() == {"name": "toy", "ready": True}
    dispatcher.facts_now = None
    assert (await http.get("/v2/models/toy/ready")).status_code == 503
    assert (await http.get("/v2/health/ready")).status_code == 503
