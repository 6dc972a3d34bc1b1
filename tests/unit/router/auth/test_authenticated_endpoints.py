"""Priority, tenant and refusals as clients of both doors see them."""

from __future__ import annotations

import grpc.aio
import openai
import pytest

from twostroke.base.errors import Overloaded
from twostroke.rpc.v1 import inference_pb2, inference_pb2_grpc

TEXT = "/v1/completions"
LATE = "the first token is predicted in 5.20 s, 3.20 s later than --slo-ttft allows"


async def generate(frontend, **fields) -> None:
    request = inference_pb2.GenerateRequest(text="abc", **fields)
    async for _ in inference_pb2_grpc.InferenceStub(frontend.channel).Generate(request):
        pass


async def test_over_http_a_lower_priority_number_is_a_higher_class(frontend):
    for priority in (0, -3, 7, 10**12, None):
        answer = await frontend.http.post(TEXT, json={"prompt": "a", "priority": priority})
        assert answer.status_code == 200
    assert [each.routing.priority for each in frontend.dispatcher.parents] == [0, 3, -7, -100, 0]


async def test_turns_are_the_headers_tenants_or_else_the_machines_and_no_user_of_its_own_choice(frontend):
    await frontend.http.post(TEXT, json={"prompt": "a", "user": "jo"}, headers={"X-Tenant-Id": "acme"})
    await frontend.http.post(TEXT, json={"prompt": "a", "user": "jo"})
    await frontend.http.post(TEXT, json={"prompt": "a"})
    async for _ in inference_pb2_grpc.InferenceStub(frontend.channel).Generate(inference_pb2.GenerateRequest(text="a")):
        pass
    assert [each.routing.tenant for each in frontend.dispatcher.parents] == ["acme", *3 * ["127.0.0.1"]]


@pytest.mark.parametrize(
    ("body", "headers", "field"),
    [
        ({"priority": "high"}, {}, "priority"),
        ({"priority": 1.5}, {}, "priority"),
        ({"user": 7}, {}, "user"),
        ({"user": "x" * 300}, {}, "user"),
        ({}, {"X-Tenant-Id": "x" * 300}, "x-tenant-id"),
    ],
)
async def test_wrong_priorities_and_tenants_are_named(app, body, headers, field):
    dispatcher, http = app
    answer = await http.post(TEXT, json={"prompt": "a", **body}, headers=headers)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == field
    assert dispatcher.requests == []


async def test_over_grpc_a_higher_priority_is_a_higher_class_and_the_tenant_a_field(frontend):
    await generate(frontend, priority=5, tenant="acme")
    await generate(frontend, priority=-(2**31))
    await generate(frontend)
    sent = [(each.routing.priority, each.routing.tenant) for each in frontend.dispatcher.parents]
    assert sent == [(5, "acme"), (-100, "127.0.0.1"), (0, "127.0.0.1")]
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await generate(frontend, tenant="x" * 300)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("stream", [False, True])
async def test_a_predicted_miss_is_429_with_whole_seconds_rounded_up(frontend, stream):
    frontend.dispatcher.failure = Overloaded(LATE, retry_after_s=3.2)
    answer = await frontend.http.post(TEXT, json={"prompt": "a", "stream": stream})
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "4")
    error = answer.json()["error"]
    assert (error["message"], error["type"]) == (LATE, "overloaded_error")


async def test_the_openai_client_raises_its_rate_limit_error(frontend):
    frontend.dispatcher.failure = Overloaded(LATE, retry_after_s=0.001)
    with pytest.raises(openai.RateLimitError) as raised:
        await frontend.openai.completions.create(model="toy", prompt="a")
    assert raised.value.response.headers["retry-after"] == "1"


async def test_over_grpc_a_predicted_miss_is_resource_exhausted_with_milliseconds(frontend):
    frontend.dispatcher.failure = Overloaded(LATE, retry_after_s=3.2)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await generate(frontend)
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert refused.value.details() == LATE
    assert dict(refused.value.trailing_metadata())["retry-after-ms"] == "3200"
    frontend.dispatcher.failure = Overloaded("full")
    with pytest.raises(grpc.aio.AioRpcError) as unpredicted:
        await generate(frontend)
    assert "retry-after-ms" not in dict(unpredicted.value.trailing_metadata())
