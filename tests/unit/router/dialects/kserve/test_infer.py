"""KServe's protocol over gRPC, with messages as clients of both dialects write them."""

from __future__ import annotations

import asyncio
import json
import struct

import grpc.aio
import pytest

from router.dialects.kserve.infer import id_of
from router.kserve import request_stream
from twostroke.base.errors import Overloaded, PeerLost
from twostroke.request import SampledToken
from twostroke.rpc.v1 import kserve_pb2 as kserve
from twostroke.rpc.v1 import kserve_pb2_grpc


def tokens(text: str) -> list[SampledToken]:
    return [SampledToken(byte) for byte in text.encode()]


def raw(value: str | bool) -> bytes:
    if isinstance(value, bool):
        return bytes([value])
    return struct.pack("<I", len(value.encode())) + value.encode()


def ask(
    *, is_raw: bool = True, parameters: dict | None = None, outputs: tuple = (), **inputs
) -> kserve.ModelInferRequest:
    request = kserve.ModelInferRequest(model_name="toy", id=inputs.pop("id", ""))
    for name, value in {"text_input": "abc", **inputs}.items():
        datatype = "BOOL" if isinstance(value, bool) else "BYTES"
        tensor = request.inputs.add(name=name, datatype=datatype, shape=[1])
        if is_raw:
            request.raw_input_contents.append(raw(value))
        elif isinstance(value, bool):
            tensor.contents.bool_contents.append(value)
        else:
            tensor.contents.bytes_contents.append(value.encode())
    for name, value in (parameters or {}).items():
        kind = {bool: "bool_param", int: "int64_param", str: "string_param", float: "double_param"}[type(value)]
        setattr(request.parameters[name], kind, value)
    for name in outputs:
        request.outputs.add(name=name)
    return request


def said(response: kserve.ModelInferResponse) -> dict:
    found = {}
    for rank, output in enumerate(response.outputs):
        if response.raw_output_contents:
            found[output.name] = unpacked(output.datatype, response.raw_output_contents[rank])
        else:
            contents = output.contents
            values = [*contents.bytes_contents, *contents.uint_contents, *contents.fp32_contents]
            found[output.name] = [value.decode() if isinstance(value, bytes) else value for value in values]
        assert len(found[output.name]) == output.shape[0]
    return found


def unpacked(datatype: str, data: bytes) -> list:
    if datatype != "BYTES":
        return list(struct.unpack(f"<{len(data) // 4}{'f' if datatype == 'FP32' else 'I'}", data))
    texts = []
    while data:
        (length,) = struct.unpack_from("<I", data)
        texts.append(data[4 : 4 + length].decode())
        data = data[4 + length :]
    return texts


def stub(frontend) -> kserve_pb2_grpc.GRPCInferenceServiceStub:
    return kserve_pb2_grpc.GRPCInferenceServiceStub(frontend.channel)


async def streamed(frontend, *requests) -> list[kserve.ModelStreamInferResponse]:
    return [response async for response in stub(frontend).ModelStreamInfer(iter(requests))]


@pytest.mark.parametrize("is_raw", [True, False])
async def test_a_whole_answer_comes_in_the_form_of_its_request(frontend, is_raw):
    response = await stub(frontend).ModelInfer(ask(id="mine", is_raw=is_raw))
    assert (response.model_name, response.model_version, response.id) == ("toy", "1", "mine")
    assert said(response) == {"text_output": ["hello"], "finish_reason": ["length"]}
    assert bool(response.raw_output_contents) == is_raw


async def test_the_vllm_backends_dialect_has_its_flags_and_sampling_parameters_as_text(frontend):
    flags = {f"return_{name}": True for name in ("finish_reason", "num_input_tokens", "num_output_tokens", "logprobs")}
    frontend.dispatcher.script = lambda request, index: [SampledToken(97, -0.5, ((97, -0.5),))]
    sampling = '{"temperature": "0.5", "max_tokens": "7", "logprobs": 1, "stop": ["x"]}'
    asked = ask(stream=False, sampling_parameters=sampling, return_cumulative_logprob=True, **flags)
    response = said(await stub(frontend).ModelInfer(asked))
    logprobs = json.loads(response.pop("logprobs")[0])
    assert logprobs == [{"97": {"logprob": -0.5, "rank": 1, "decoded_token": "a"}}]
    assert response == {
        "text_output": ["abca"],
        "finish_reason": ["length"],
        "cumulative_logprob": [-0.5],
        "num_input_tokens": [3],
        "num_output_tokens": [1],
    }
    params = frontend.dispatcher.requests[0].sampling
    assert (params.temperature, params.max_tokens, params.logprobs) == (0.5, 7, 1)
    answer = said(await stub(frontend).ModelInfer(ask(stream=False, exclude_input_in_output=True)))
    assert answer == {"text_output": ["a"]}


async def test_parameters_of_the_request_are_sampling_parameters_too(frontend):
    parameters = {"max_tokens": 2, "temperature": 0.25, "ignore_eos": True, "seed": 9, "priority": 4, "other": "x"}
    response = await stub(frontend).ModelInfer(ask(parameters=parameters))
    assert said(response)["text_output"] == ["he"]
    (parent,) = frontend.dispatcher.parents
    params = parent.request.sampling
    assert (params.temperature, params.ignore_eos, params.seed, parent.routing.priority) == (0.25, True, 9, -4)


async def test_only_outputs_that_the_client_names_come(frontend):
    response = await stub(frontend).ModelInfer(ask(outputs=("num_output_tokens", "text_output")))
    assert said(response) == {"text_output": ["hello"], "num_output_tokens": [5]}
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await stub(frontend).ModelInfer(ask(outputs=("logits",)))
    assert "logits" in refused.value.details()


@pytest.mark.parametrize("name", ["streaming", "stream"])
async def test_a_stream_has_a_response_for_every_token_and_says_which_is_the_last(frontend, name):
    responses = await streamed(frontend, ask(id="mine", **{name: True, "return_finish_reason": True}))
    assert {response.error_message for response in responses} == {""}
    responses = [response.infer_response for response in responses]
    assert [said(response)["text_output"] for response in responses] == [[char] for char in "hello"] + [[""]]
    assert [said(response)["finish_reason"] for response in responses] == [["None"]] * 5 + [["length"]]
    finals = [response.parameters["triton_final_response"].bool_param for response in responses]
    assert finals == [False] * 5 + [True]
    assert {response.id for response in responses} == {"mine"}


async def test_a_streams_responses_count_their_own_tokens_and_sum_the_logprobs_of_all(frontend):
    frontend.dispatcher.script = lambda request, index: [SampledToken(byte, -0.5, ()) for byte in b"abc"]
    flags = {"return_cumulative_logprob": True, "return_num_output_tokens": True, "return_num_input_tokens": True}
    asked = ask(stream=True, sampling_parameters='{"logprobs": 0}', **flags)
    answered = [said(response.infer_response) for response in await streamed(frontend, asked)]
    assert [each["text_output"][0] for each in answered] == ["a", "b", "c", ""]
    assert [each["cumulative_logprob"][0] for each in answered] == [-0.5, -1.0, -1.5, -1.5]
    assert [each["num_output_tokens"][0] for each in answered] == [1, 1, 1, 0]
    assert {each["num_input_tokens"][0] for each in answered} == {3}


async def test_dynamos_responses_before_the_last_have_no_reason(frontend):
    responses = await streamed(frontend, ask(streaming=True))
    assert [said(response.infer_response)["finish_reason"][0] for response in responses] == [""] * 5 + ["length"]


async def test_an_empty_response_ends_the_answer_where_a_client_asks_for_it(frontend):
    for streaming in (True, False):
        asked = ask(streaming=streaming, parameters={"triton_enable_empty_final_response": True})
        *others, last = [response.infer_response for response in await streamed(frontend, asked)]
        assert not last.outputs
        assert last.parameters["triton_final_response"].bool_param
        assert not any(response.parameters["triton_final_response"].bool_param for response in others)
        assert "".join(said(response)["text_output"][0] for response in others) == "hello"


async def test_requests_of_one_stream_are_answered_at_the_same_time_and_errors_end_none_but_theirs(frontend):
    frontend.dispatcher.script = lambda request, index: tokens(bytes(request.prompt).decode())
    requests = [ask(id=f"r{rank}", text_input=f"text {rank}", streaming=bool(rank % 2)) for rank in range(6)]
    wrong = ask(id="wrong", sampling_parameters='{"max_tokens": 0}')
    got = await streamed(frontend, requests[0], wrong, *requests[1:])
    errors = [response for response in got if response.error_message]
    assert [(error.infer_response.id, "max_tokens" in error.error_message) for error in errors] == [("wrong", True)]
    assert not errors[0].infer_response.parameters["retryable"].bool_param
    for rank in range(6):
        mine = [each.infer_response for each in got if each.infer_response.id == f"r{rank}"]
        assert "".join(said(response)["text_output"][0] for response in mine) == f"text {rank}"
        assert len(mine) == (7 if rank % 2 else 1)


async def test_a_failure_in_a_stream_says_whether_and_when_to_try_again(frontend):
    frontend.dispatcher.failure, frontend.dispatcher.failure_after = Overloaded("full", retry_after_s=1.5), 2
    *begun, failed = await streamed(frontend, ask(id="mine", streaming=True))
    assert [said(response.infer_response)["text_output"] for response in begun] == [["h"], ["e"]]
    assert (failed.error_message, failed.infer_response.id) == ("full", "mine")
    parameters = failed.infer_response.parameters
    assert (parameters["retryable"].bool_param, parameters["retry_after_ms"].int64_param) == (True, 1500)
    frontend.dispatcher.failure_after = 0
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await stub(frontend).ModelInfer(ask())
    assert (refused.value.code(), refused.value.details()) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "full")
    assert dict(refused.value.trailing_metadata())["retry-after-ms"] == "1500"
    frontend.dispatcher.failure = PeerLost("gone")
    (failed,) = await streamed(frontend, ask(streaming=True))
    assert failed.error_message == "gone"


async def test_a_client_that_leaves_ends_what_it_asked_for(frontend):
    frontend.dispatcher.stalls, frontend.dispatcher.failure_after = True, 2
    call = stub(frontend).ModelStreamInfer(iter([ask(id=str(rank), streaming=True) for rank in range(2)]))
    await frontend.dispatcher.two_open.wait()
    await frontend.dispatcher.stalled.wait()
    call.cancel()
    async with asyncio.timeout(60):
        await frontend.dispatcher.all_closed.wait()
    frontend.dispatcher.stalled.clear()
    call = stub(frontend).ModelInfer(ask())
    await frontend.dispatcher.stalled.wait()
    call.cancel()
    async with asyncio.timeout(60):
        await frontend.dispatcher.all_closed.wait()


async def test_a_stream_in_which_nothing_is_asked_ends(frontend, monkeypatch):
    monkeypatch.setattr(request_stream, "IDLE_S", 0.05)
    call = stub(frontend).ModelStreamInfer()
    await call.write(ask(id="mine"))
    assert (await call.read()).infer_response.id == "mine"
    with pytest.raises(grpc.aio.AioRpcError) as ended:
        await call.read()
    assert ended.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_a_router_that_is_drained_says_so_and_ends_the_stream(frontend):
    call = stub(frontend).ModelStreamInfer()
    await call.write(ask(id="first"))
    assert (await call.read()).infer_response.id == "first"
    frontend.dispatcher.is_draining = True
    await call.write(ask(id="second"))
    failed = await call.read()
    assert (failed.infer_response.id, "shutting down" in failed.error_message) == ("second", True)
    with pytest.raises(grpc.aio.AioRpcError) as ended:
        await call.read()
    assert ended.value.code() is grpc.StatusCode.UNAVAILABLE
    assert not (await stub(frontend).ServerReady(kserve.ServerReadyRequest())).ready


def shaped(*shape: int, datatype: str = "BYTES", data: bytes | None = None) -> kserve.ModelInferRequest:
    request = kserve.ModelInferRequest(model_name="toy")
    request.inputs.add(name="text_input", datatype=datatype, shape=shape)
    request.raw_input_contents.append(raw("abc") if data is None else data)
    return request


def without_contents() -> kserve.ModelInferRequest:
    request = ask(is_raw=False)
    request.inputs[0].contents.Clear()
    return request


def twice() -> kserve.ModelInferRequest:
    request = ask()
    request.MergeFrom(ask())
    return request


BAD = [
    (kserve.ModelInferRequest(), "text_input"),
    (ask(image="x"), "image"),
    (ask(text_input=""), "prompt"),
    (shaped(2), "text_input must have one value"),
    (shaped(), "text_input must have one value"),
    (shaped(1, 1, 1), "text_input must have one value"),
    (shaped(-1), "text_input must have one value"),
    (shaped(1, datatype="INT64"), "text_input must have datatype BYTES"),
    (shaped(1, data=b"abc"), "text_input must be one string"),
    (shaped(1, data=raw("abc") + b"x"), "text_input must be one string"),
    (shaped(1, data=struct.pack("<I", 1) + b"\xff"), "text_input is not valid UTF-8"),
    (without_contents(), "text_input must have one entry"),
    (twice(), "text_input is there twice"),
    (kserve.ModelInferRequest(inputs=ask().inputs, raw_input_contents=[b"", b""]), "raw_input_contents"),
    (ask(streaming="true"), "streaming must have datatype BOOL"),
    (ask(sampling_parameters="{"), "sampling_parameters"),
    (ask(sampling_parameters='{"temprature": 1}'), "temprature"),
    (ask(stream=True, exclude_input_in_output=False), "exclude_input_in_output"),
    (ask(parameters={"sequence_id": 5}), "sequence_id"),
    (ask(parameters={"max_tokens": "many"}), "max_tokens"),
    (ask(parameters={"max_tokens": 1.5}), "max_tokens"),
    (ask(parameters={"temperature": float("nan")}), "temperature"),
    (ask(streaming=True, parameters={"n": 2}), "n"),
]


@pytest.mark.parametrize(("request_sent", "named"), BAD)
async def test_what_is_wrong_is_named_in_one_line(frontend, request_sent, named):
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await stub(frontend).ModelInfer(request_sent)
    assert refused.value.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED)
    assert named in refused.value.details()
    assert "\n" not in refused.value.details()
    (failed,) = await streamed(frontend, request_sent)
    assert named in failed.error_message
    assert frontend.dispatcher.requests == []


async def test_only_a_stream_streams(frontend):
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await stub(frontend).ModelInfer(ask(streaming=True))
    assert "ModelStreamInfer" in refused.value.details()


async def test_other_models_and_versions_are_not_found(frontend):
    for request in (kserve.ModelInferRequest(model_name="other"), kserve.ModelInferRequest(model_version="2")):
        request.MergeFrom(ask(is_raw=False))
        request.model_name = "other" if request.model_version == "" else "toy"
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub(frontend).ModelInfer(request)
        assert refused.value.code() is grpc.StatusCode.NOT_FOUND
    assert not (await stub(frontend).ModelReady(kserve.ModelReadyRequest(name="other"))).ready
    with pytest.raises(grpc.aio.AioRpcError):
        await stub(frontend).ModelConfig(kserve.ModelConfigRequest(name="other"))


async def test_the_server_and_its_model_are_described(frontend):
    calls = stub(frontend)
    assert (await calls.ServerLive(kserve.ServerLiveRequest())).live
    assert (await calls.ServerReady(kserve.ServerReadyRequest())).ready
    assert (await calls.ModelReady(kserve.ModelReadyRequest(name="toy", version="1"))).ready
    assert (await calls.ServerMetadata(kserve.ServerMetadataRequest())).name == "twostroke"
    model = await calls.ModelMetadata(kserve.ModelMetadataRequest(name="toy"))
    assert (model.name, list(model.versions), model.inputs[0].name) == ("toy", ["1"], "text_input")
    config = (await calls.ModelConfig(kserve.ModelConfigRequest(name="toy"))).config
    assert (config.max_batch_size, config.model_transaction_policy.decoupled) == (0, True)
    assert (config.input[0].name, config.input[0].data_type, config.input[0].optional) == (
        "text_input",
        kserve.TYPE_STRING,
        False,
    )


def test_the_id_of_a_request_is_found_without_reading_it():
    assert id_of(ask(id="mine", parameters={"a": 1}).SerializeToString()) == "mine"
    assert id_of(ask().SerializeToString()) == ""
    for garbage in (b"", b"\xff" * 40, b"\x1a\xff\xff\xff\xff\x0fab", b"\x08\x01", b"\x1a\x02\xff\xfe"):
        assert isinstance(id_of(garbage), str)
