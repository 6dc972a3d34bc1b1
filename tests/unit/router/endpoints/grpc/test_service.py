"""The gRPC door, seen by stubs made from our protos."""

from __future__ import annotations

import asyncio
import json
import time

import grpc
import grpc.aio
import pytest
from google.protobuf import descriptor_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2

from router.endpoints.grpc.service import SERVICE_NAME
from router.kserve.service import SERVICE_NAME as KSERVE_NAME
from router.text.tokenizer import ByteText
from twostroke.base.errors import Overloaded
from twostroke.kv_cache.block import owner_salt
from twostroke.request import SampledToken, token_bits
from twostroke.rpc.channel import error_of
from twostroke.rpc.v1 import control_pb2, control_pb2_grpc, inference_pb2, inference_pb2_grpc


def tokens(text: str) -> list[SampledToken]:
    return [SampledToken(byte) for byte in text.encode()]


def ask(text: str = "abc", **fields) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(text=text, **fields)


def asked(**fields) -> inference_pb2.GenerateRequest:
    message = inference_pb2.ChatMessage(role="user", content="hi")
    return inference_pb2.GenerateRequest(chat=inference_pb2.Chat(messages=[message], **fields))


async def answers(frontend, request, **options) -> list[inference_pb2.GenerateResponse]:
    return [
        message async for message in inference_pb2_grpc.InferenceStub(frontend.channel).Generate(request, **options)
    ]


async def refusal(frontend, request, **options) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await answers(frontend, request, **options)
    return refused.value


async def test_every_token_is_its_own_message_and_the_last_has_the_usage(frontend):
    messages = await answers(frontend, ask(request_id="mine"))
    assert [message.text for message in messages] == [*"hello", ""]
    assert [list(message.token_ids) for message in messages] == [[byte] for byte in b"hello"] + [[]]
    assert [message.finish_reason for message in messages] == [""] * 5 + ["length"]
    assert {message.request_id for message in messages} == {"mine"}
    assert [message.HasField("usage") for message in messages] == [False] * 5 + [True]
    usage = messages[-1].usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (3, 5, 3)


async def test_each_choice_ends_with_its_reason_and_stop_strings_are_applied(frontend):
    frontend.dispatcher.script = lambda request, index: tokens(("ab|cd", "abcdef")[index])
    messages = await answers(frontend, ask(n=2, stop=inference_pb2.StopOptions(stop=["|"])))
    for index, (text, reason) in enumerate([("ab", "stop"), ("abcdef", "length")]):
        mine = [message for message in messages if message.index == index]
        assert "".join(message.text for message in mine) == text
        assert [message.finish_reason for message in mine if message.finish_reason] == [reason]
        assert mine[-1].finish_reason == reason
    assert [message.HasField("usage") for message in messages[:-1]] == [False] * (len(messages) - 1)
    assert messages[-1].HasField("usage")


async def test_chats_token_ids_and_all_options_reach_the_worker(frontend):
    sampling = inference_pb2.SamplingOptions(
        temperature=0.5,
        top_k=7,
        top_p=0.9,
        min_p=0.1,
        seed=2**64 - 1,
        logit_bias={5: 3.0},
        logprobs=2,
        allowed_token_ids=[40, 5],
        logprob_token_ids=[9, 8],
    )
    stop = inference_pb2.StopOptions(stop_token_ids=[9], max_tokens=8, min_tokens=2, ignore_eos=True)
    request = inference_pb2.GenerateRequest(
        token_ids=inference_pb2.TokenIds(ids=[1, 2, 3]), sampling=sampling, stop=stop, cache_salt="tenant"
    )
    await answers(frontend, request)
    seen = frontend.dispatcher.requests[0]
    params = seen.sampling
    assert (seen.prompt, seen.salt) == ((1, 2, 3), owner_salt("", b"tenant"))
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.5, 7, 0.9, 0.1)
    assert (params.seed, params.logit_bias, params.logprobs) == (2**64 - 1, ((5, 3.0),), 2)
    assert (params.allowed_tokens, params.logprob_token_ids) == (token_bits([5, 40]), (9, 8))
    assert (params.stop_token_ids, params.max_tokens, params.min_tokens, params.ignore_eos) == ((9,), 8, 2, True)
    chat = inference_pb2.Chat(messages=[inference_pb2.ChatMessage(role="user", content="hi")])
    await answers(frontend, inference_pb2.GenerateRequest(chat=chat))
    assert bytes(frontend.dispatcher.requests[1].prompt) == b"user: hi\nassistant: "


async def test_a_chat_has_all_that_the_openai_api_has(frontend, monkeypatch):
    seen = []
    monkeypatch.setattr(ByteText, "render_chat", lambda text, chat: seen.append(chat) or "rendered")
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
    message = {"role": "assistant", "content": "", "reasoning_content": "I should look.", "tool_calls": [
        {"id": "call-1", "type": "function", "function": {"name": "look", "arguments": '{"at": 7}'}}
    ]}  # fmt: skip
    answer = {"role": "tool", "content": "seven", "tool_call_id": "call-1", "name": "look"}
    fields = {"add_generation_prompt": False, "tool_choice": "none", "parallel_tool_calls": False}
    kwargs = {"enable_thinking": False}
    body = {"messages": [message, answer], "tools": tools, "chat_template_kwargs": kwargs, **fields}
    call = inference_pb2.ToolCall(id="call-1", name="look", arguments='{"at": 7}')
    messages = [
        inference_pb2.ChatMessage(role="assistant", reasoning="I should look.", tool_calls=[call]),
        inference_pb2.ChatMessage(**answer),
    ]
    chat = inference_pb2.Chat(
        messages=messages, tools=json.dumps(tools), chat_template_kwargs=json.dumps(kwargs), **fields
    )
    await answers(frontend, inference_pb2.GenerateRequest(chat=chat))
    assert (await frontend.http.post("/v1/chat/completions", json=body)).status_code == 200
    assert seen[0] == seen[1]
    assert seen[0].messages[0]["tool_calls"][0]["function"]["arguments"] == {"at": 7}


async def test_fields_that_are_not_set_have_their_defaults_not_zero(frontend):
    await answers(frontend, ask())
    params = frontend.dispatcher.requests[0].sampling
    assert (params.temperature, params.top_p, params.top_k, params.repetition_penalty) == (1.0, 1.0, None, 1.0)
    assert (params.max_tokens, params.logprobs) == (16, None)
    assert frontend.dispatcher.requests[0].deadline_s is None


async def test_logprobs_come_with_their_tokens(frontend):
    frontend.dispatcher.script = lambda request, index: [SampledToken(97, -0.5, ((98, -1.0),))]
    first, _ = await answers(frontend, ask(sampling=inference_pb2.SamplingOptions(logprobs=1)))
    assert (first.logprobs[0].token, first.logprobs[0].token_id, first.logprobs[0].logprob) == ("a", 97, -0.5)
    assert (first.logprobs[0].top[0].token, first.logprobs[0].top[0].logprob) == ("b", -1.0)


async def test_logprobs_of_the_prompt_come_with_the_first_message_of_each_choice(frontend):
    got = await answers(frontend, ask("abc", n=2, sampling=inference_pb2.SamplingOptions(prompt_logprobs=1)))
    firsts = [next(message for message in got if message.index == index) for index in (0, 1)]
    for first in firsts:
        shown = [(entry.token, entry.token_id, entry.logprob, entry.rank) for entry in first.prompt_logprobs]
        assert shown == [("b", 98, -1.0, 1), ("c", 99, -2.0, 2)]
        assert [(top.token, top.logprob) for top in first.prompt_logprobs[0].top] == [("c", 0.0)]
    assert not any(message.prompt_logprobs for message in got if message not in firsts)


BAD = [
    (inference_pb2.GenerateRequest(), "prompt"),
    (ask(""), "prompt"),
    (inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=[300])), "prompt"),
    (ask("a" * 256), "prompt"),
    (inference_pb2.GenerateRequest(chat=inference_pb2.Chat()), "messages"),
    (asked(tools="[{"), "tools"),
    (asked(tools='{"a": 1}'), "tools"),
    (asked(tools="[" * 5000), "tools"),
    (asked(chat_template_kwargs="[]"), "chat_template_kwargs"),
    (asked(chat_template_kwargs='{"a": "\\ud800"}'), "chat_template_kwargs.a"),
    (asked(continue_final_message=True, add_generation_prompt=True), "continue_final_message"),
    (ask(n=0), "n"),
    (ask(stop=inference_pb2.StopOptions(max_tokens=256)), "max_tokens"),
    (ask(stop=inference_pb2.StopOptions(stop=["x"] * 17)), "stop"),
    (ask(sampling=inference_pb2.SamplingOptions(temperature=-1)), "temperature"),
    (ask(sampling=inference_pb2.SamplingOptions(temperature=float("nan"))), "temperature"),
    (ask(sampling=inference_pb2.SamplingOptions(top_p=1.5)), "top_p"),
    (ask(sampling=inference_pb2.SamplingOptions(top_p=float("nan"))), "top_p"),
    (ask(sampling=inference_pb2.SamplingOptions(min_p=float("nan"))), "min_p"),
    (ask(sampling=inference_pb2.SamplingOptions(repetition_penalty=1e39)), "repetition_penalty"),
    (ask(sampling=inference_pb2.SamplingOptions(repetition_penalty=1e-45)), "repetition_penalty"),
    (ask(sampling=inference_pb2.SamplingOptions(repetition_penalty=float("inf"))), "repetition_penalty"),
    (ask(sampling=inference_pb2.SamplingOptions(presence_penalty=float("nan"))), "presence_penalty"),
    (ask(sampling=inference_pb2.SamplingOptions(frequency_penalty=-2.5)), "frequency_penalty"),
    (ask(sampling=inference_pb2.SamplingOptions(logit_bias={5: float("nan")})), "logit_bias"),
    (ask(sampling=inference_pb2.SamplingOptions(logit_bias={5: float("-inf")})), "logit_bias"),
    (ask(sampling=inference_pb2.SamplingOptions(prompt_logprobs=21)), "prompt_logprobs"),
    (ask(sampling=inference_pb2.SamplingOptions(allowed_token_ids=[300])), "allowed_token_ids"),
    (ask(sampling=inference_pb2.SamplingOptions(logprob_token_ids=[1])), "logprob_token_ids"),
    (ask(sampling=inference_pb2.SamplingOptions(logprob_token_ids=[300], logprobs=0)), "logprob_token_ids"),
    (ask(cache_salt=""), "cache_salt"),
    (ask(request_id="a\nb"), "request_id"),
]


async def test_bad_requests_are_invalid_arguments_that_name_the_field(frontend):
    for request, field in BAD:
        refused = await refusal(frontend, request)
        assert refused.code() is grpc.StatusCode.INVALID_ARGUMENT, request
        assert error_of(refused, "router").field == field
        assert field in refused.details()
    assert frontend.dispatcher.requests == []


async def test_what_is_not_there_and_what_is_not_done_have_statuses_of_their_own(frontend):
    assert (await refusal(frontend, ask(model="gpt"))).code() is grpc.StatusCode.NOT_FOUND
    too_large = await refusal(frontend, ask("a" * (1 << 17)))
    assert too_large.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    frontend.dispatcher.failure = Overloaded("full")
    overloaded = await refusal(frontend, ask())
    assert overloaded.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert dict(overloaded.trailing_metadata())["twostroke-retryable"] == "true"
    frontend.dispatcher.facts_now = None
    assert (await refusal(frontend, ask())).code() is grpc.StatusCode.UNAVAILABLE


async def test_text_that_is_not_utf8_is_refused_and_the_server_goes_on(frontend):
    call = frontend.channel.unary_stream("/twostroke.v1.Inference/Generate")
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        [message async for message in call(b"\x1a\x02\xff\xfe")]
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "UTF-8" in refused.value.details()
    assert len(await answers(frontend, ask())) == 6


@pytest.mark.parametrize("tokens_before", [0, 2])
async def test_a_deadline_ends_the_call_and_frees_the_request(frontend, tokens_before):
    frontend.dispatcher.stalls, frontend.dispatcher.failure_after = True, tokens_before
    refused = await refusal(frontend, ask(), timeout=0.3)
    assert refused.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await frontend.dispatcher.all_closed.wait()
    assert frontend.dispatcher.requests[0].deadline_s is not None


@pytest.mark.parametrize("tokens_before", [0, 2])
async def test_a_client_that_cancels_frees_its_request(frontend, tokens_before):
    frontend.dispatcher.stalls, frontend.dispatcher.failure_after = True, tokens_before
    call = inference_pb2_grpc.InferenceStub(frontend.channel).Generate(ask(n=2))
    await frontend.dispatcher.stalled.wait()
    call.cancel()
    await frontend.dispatcher.all_closed.wait()
    assert frontend.dispatcher.open_ids == set()


async def test_abort_ends_the_stream_of_that_request_alone(frontend):
    frontend.dispatcher.stalls = True
    stub = inference_pb2_grpc.InferenceStub(frontend.channel)
    calls = [asyncio.create_task(refusal(frontend, ask(request_id=name))) for name in ("one", "two")]
    await frontend.dispatcher.two_open.wait()
    tokens = {stream.partition("~")[0]: f"{stream}:0:-" for stream in frontend.dispatcher.open_ids}
    repeated = await refusal(frontend, ask(request_id="one"))
    assert error_of(repeated, "router").field == "request_id"
    assert not (await stub.Abort(inference_pb2.AbortRequest(request_id="one"))).found, "others can guess that"
    assert (await stub.Abort(inference_pb2.AbortRequest(resume_token=tokens["one"]))).found
    assert (await calls[0]).code() is grpc.StatusCode.CANCELLED
    (left,) = frontend.dispatcher.open_ids
    assert left.startswith("two~")
    for unknown in ("three", "three:0:-", "two:0:-", "two~0123456789abcdef:0:-", ":::", "%"):
        assert not (await stub.Abort(inference_pb2.AbortRequest(resume_token=unknown))).found
    assert (await stub.Abort(inference_pb2.AbortRequest(resume_token=tokens["two"]))).found
    await calls[1]


async def test_text_and_chats_can_be_tokenized(frontend):
    stub = inference_pb2_grpc.InferenceStub(frontend.channel)
    answer = await stub.Tokenize(inference_pb2.TokenizeRequest(text="hé"))
    assert list(answer.token_ids) == list("hé".encode())
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await stub.Tokenize(inference_pb2.TokenizeRequest())
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_tokens_become_the_text_that_they_stand_for(frontend):
    stub = inference_pb2_grpc.InferenceStub(frontend.channel)
    answer = await stub.Detokenize(inference_pb2.DetokenizeRequest(token_ids="hé".encode()))
    assert answer.text == "hé"
    for bad in ({"token_ids": [300]}, {"token_ids": [1], "model": "another"}):
        with pytest.raises(grpc.aio.AioRpcError):
            await stub.Detokenize(inference_pb2.DetokenizeRequest(**bad))


async def test_a_suffix_goes_with_text_alone_and_needs_a_model_that_fills_in(frontend):
    stub = inference_pb2_grpc.InferenceStub(frontend.channel)
    chat = inference_pb2.Chat(messages=[inference_pb2.ChatMessage(role="user", content="a")])
    ids = inference_pb2.TokenIds(ids=[1])
    for prompt, words in (({"chat": chat}, "text"), ({"token_ids": ids}, "text"), ({"text": "a"}, "not supported by")):
        with pytest.raises(grpc.aio.AioRpcError, match=f"suffix .*{words}"):
            await anext(aiter(stub.Generate(inference_pb2.GenerateRequest(**prompt, suffix="b"))))


async def test_control_tells_about_the_router_and_the_model(frontend):
    stub = control_pb2_grpc.ControlStub(frontend.admin)
    server = await stub.GetServerInfo(control_pb2.GetServerInfoRequest())
    assert (server.server_id, server.role, server.fingerprint) == ("router-0", "router", "toy/1")
    assert server.state == control_pb2.WORKER_STATE_SERVING
    model = await stub.GetModelInfo(control_pb2.GetModelInfoRequest())
    assert (model.model, model.max_model_len, model.vocab_size, list(model.eos_token_ids)) == ("toy", 256, 300, [299])
    load = await stub.GetLoad(control_pb2.GetLoadRequest())
    assert load.workers[0].load.running == 7
    events = stub.SubscribeKvEvents(control_pb2.SubscribeKvEventsRequest(worker_id="decode-0"))
    assert [(batch.worker_id, batch.snapshot) async for batch in events] == [("decode-0", True)]
    forgotten = await stub.ForgetCached(control_pb2.ForgetCachedRequest())
    assert (forgotten.blocks, forgotten.pinned) == (7, 2)


async def test_a_drained_router_reports_not_serving_and_takes_no_new_request(frontend):
    health = health_pb2_grpc.HealthStub(frontend.channel)
    watch = health.Watch(health_pb2.HealthCheckRequest(service="ready"))
    states = aiter(watch)
    while (await anext(states)).status != health_pb2.HealthCheckResponse.SERVING:
        pass
    stub = control_pb2_grpc.ControlStub(frontend.admin)
    assert (await stub.Drain(control_pb2.DrainRequest(deadline_s=0))).open_requests == 0
    while (await anext(states)).status != health_pb2.HealthCheckResponse.NOT_SERVING:
        pass
    watch.cancel()
    refused = await refusal(frontend, ask())
    assert refused.code() is grpc.StatusCode.UNAVAILABLE
    server = await stub.GetServerInfo(control_pb2.GetServerInfoRequest())
    assert server.state == control_pb2.WORKER_STATE_DRAINING
    live = await health.Check(health_pb2.HealthCheckRequest(service="live"))
    assert live.status == health_pb2.HealthCheckResponse.SERVING


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
async def test_reflection_lists_the_services_of_each_port_and_clients_have_no_control(frontend, version):
    ask_list = reflection_pb2.ServerReflectionRequest(list_services="")
    ask_what = reflection_pb2.ServerReflectionRequest(
        file_containing_symbol=f"grpc.reflection.{version}.ServerReflection"
    )
    of_clients = {SERVICE_NAME, KSERVE_NAME}
    of_admin = {f"twostroke.v1.{name}" for name in ("Control", "PinAdmin", "AdapterAdmin")}
    for channel, offers in ((frontend.channel, of_clients), (frontend.admin, of_admin)):
        answers = channel.stream_stream(
            f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
            request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
            response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
        )(iter([ask_list, ask_what]))
        listed, described = [answer async for answer in answers]
        names = {service.name for service in listed.list_services_response.service}
        versions = {f"grpc.reflection.{each}.ServerReflection" for each in ("v1", "v1alpha")}
        assert names == {*offers, "grpc.health.v1.Health", *versions}
        file = descriptor_pb2.FileDescriptorProto.FromString(
            described.file_descriptor_response.file_descriptor_proto[0]
        )
        assert file.package == f"grpc.reflection.{version}"
        assert file.service[0].method[0].input_type == f".grpc.reflection.{version}.ServerReflectionRequest"
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await control_pb2_grpc.ControlStub(frontend.channel).GetLoad(control_pb2.GetLoadRequest())
    assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_health_knows_the_services_of_each_port_by_name_and_lists_them(frontend):
    status = health_pb2.HealthCheckResponse
    admin = [f"twostroke.v1.{name}" for name in ("Control", "PinAdmin", "AdapterAdmin", "Routing")]
    for channel, services in ((frontend.channel, [SERVICE_NAME, KSERVE_NAME]), (frontend.admin, admin)):
        health, service = health_pb2_grpc.HealthStub(channel), services[0]
        states = aiter(health.Watch(health_pb2.HealthCheckRequest(service=service)))
        while (await anext(states)).status != status.SERVING:
            pass
        assert (await health.Check(health_pb2.HealthCheckRequest(service=service))).status == status.SERVING
        listed = (await health.List(health_pb2.HealthListRequest())).statuses
        assert {name: each.status for name, each in listed.items()} == dict.fromkeys(
            ("", "ready", "live", *services), status.SERVING
        )
        unknown = aiter(health.Watch(health_pb2.HealthCheckRequest(service="nobody")))
        assert (await anext(unknown)).status == status.SERVICE_UNKNOWN
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await health.Check(health_pb2.HealthCheckRequest(service="nobody"))
        assert refused.value.code() is grpc.StatusCode.NOT_FOUND
    frontend.dispatcher.is_draining = True
    health = health_pb2_grpc.HealthStub(frontend.channel)
    states = aiter(health.Watch(health_pb2.HealthCheckRequest(service="twostroke.v1.Inference")))
    while (await anext(states)).status != status.NOT_SERVING:
        pass


async def test_clients_learn_which_model_it_is(frontend):
    model = await inference_pb2_grpc.InferenceStub(frontend.channel).GetModel(inference_pb2.GetModelRequest())
    assert (model.model, model.max_model_len, model.vocab_size) == ("toy", 256, 300)


async def test_the_deadline_of_a_drain_is_counted_from_now(frontend):
    stub = control_pb2_grpc.ControlStub(frontend.admin)
    before_s = time.time()
    await stub.Drain(control_pb2.DrainRequest(deadline_s=100))
    assert frontend.dispatcher.drained_until_s is not None
    assert before_s + 100 <= frontend.dispatcher.drained_until_s <= time.time() + 100


@pytest.mark.parametrize("deadline_s", [-1.0, float("nan"), float("inf")])
async def test_a_drain_without_a_sensible_deadline_is_refused(frontend, deadline_s):
    stub = control_pb2_grpc.ControlStub(frontend.admin)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await stub.Drain(control_pb2.DrainRequest(deadline_s=deadline_s))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert error_of(refused.value, "router").field == "deadline_s"
    assert not frontend.dispatcher.is_draining
