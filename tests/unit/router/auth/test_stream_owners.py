"""Without API keys: what a stranger can say, which is a tenant's name and a request's id, opens nobody's stream."""

from __future__ import annotations

import asyncio

import grpc.aio
import pytest

from tests.unit.router.conftest import Frontend
from twostroke.rpc.v1 import inference_pb2, inference_pb2_grpc

TEXT = "/v1/completions"


async def answer(frontend: Frontend, **fields: str) -> list[inference_pb2.GenerateResponse]:
    stop = inference_pb2.StopOptions(max_tokens=5)
    request = inference_pb2.GenerateRequest(text="a", stop=stop, **fields)
    return [message async for message in inference_pb2_grpc.InferenceStub(frontend.channel).Generate(request)]


async def test_only_whoever_has_a_token_goes_on_and_as_the_same_tenant(frontend: Frontend) -> None:
    sent = await answer(frontend, request_id="mine", tenant="acme")
    token = sent[2].resume_token
    assert "".join(message.text for message in await answer(frontend, resume_from=token, tenant="acme")) == "lo"
    stream, _, rest = token.partition(":")
    drawn = stream.removeprefix("mine~").partition(".")[0]
    forged = [f"mine~{drawn}:{rest}", f"mine~{drawn}.{'0' * 16}:{rest}", f"mine~{'0' * 16}:{rest}", f"mine:{rest}"]
    other = (await answer(frontend, request_id="mine", tenant="other"))[2].resume_token
    forged.append(f"mine~{drawn}.{other.partition('.')[2].partition(':')[0]}:{rest}")
    for tenant, said in [*(("acme", each) for each in forged), ("", token), ("other", token)]:
        with pytest.raises(grpc.aio.AioRpcError, match="resume_from"):
            await answer(frontend, resume_from=said, tenant=tenant)
        body = {"prompt": "a", "stream": True, "max_tokens": 5}
        refused = await frontend.http.post(TEXT, json=body, headers={"last-event-id": said, "x-tenant-id": tenant})
        assert refused.status_code == 400


async def test_an_id_that_a_client_chose_aborts_nothing_and_one_that_was_drawn_does(frontend: Frontend) -> None:
    frontend.dispatcher.stalls = True
    stub = inference_pb2_grpc.InferenceStub(frontend.channel)
    chosen = asyncio.create_task(
        frontend.http.post(TEXT, json={"prompt": "a"}, headers={"x-request-id": "mine", "x-tenant-id": "acme"})
    )
    drawn = asyncio.create_task(frontend.http.post(TEXT, json={"prompt": "a"}))
    await frontend.dispatcher.two_open.wait()
    ids = {stream.partition("~")[0] for stream in frontend.dispatcher.open_ids} - {"mine"}
    assert not (await stub.Abort(inference_pb2.AbortRequest(request_id="mine"))).found
    again = asyncio.create_task(frontend.http.post(TEXT, json={"prompt": "a"}, headers={"x-request-id": "mine"}))
    while len(frontend.dispatcher.open_ids) < 3:
        await asyncio.sleep(0.01)
    assert not (await stub.Abort(inference_pb2.AbortRequest(request_id="mine"))).found
    (name,) = ids
    assert (await stub.Abort(inference_pb2.AbortRequest(request_id=name))).found
    assert (await drawn).status_code == 499
    for task in (chosen, again):
        assert not task.done()
        task.cancel()
    await frontend.dispatcher.all_closed.wait()
