"""The tritonclient package, run by a Python that has nothing else: asks on stdin, answers on stdout, both as JSON.

Whole answers come over gRPC and HTTP, in the dialects of Dynamo and of Triton's vLLM backend, and must be the same.
Over HTTP tensors come and go as bytes, as the client does by default, and in JSON.
"""

import asyncio
import json
import queue
import sys

import numpy as np
import tritonclient.grpc as over_grpc
import tritonclient.http as over_http
import tritonclient.http.aio as over_aio
from tritonclient.utils import InferenceServerException

PATIENCE_S = 60
COUNTS = ("num_input_tokens", "num_output_tokens")


def tensor(package, name, value):
    is_flag = isinstance(value, bool)
    given = package.InferInput(name, [1], "BOOL" if is_flag else "BYTES")
    return given.set_data_from_numpy(np.array([value], dtype=bool if is_flag else object))


def tensor_in_json(name, value):
    array = np.array([value], dtype=bool if isinstance(value, bool) else object)
    given = over_http.InferInput(name, [1], "BOOL" if isinstance(value, bool) else "BYTES")
    return given.set_data_from_numpy(array, binary_data=False)


def inputs(package, ask, **flags):
    values = {"text_input": ask["prompt"], **flags, **{f"return_{name}": True for name in COUNTS}}
    return [tensor(package, name, value) for name, value in values.items()]


def of_vllm(package, ask, **flags):
    sampling = json.dumps({"max_tokens": str(ask["max_tokens"]), "temperature": "0"})
    return inputs(package, ask, sampling_parameters=sampling, exclude_input_in_output=True, **flags)


def parameters(ask):
    return {"max_tokens": ask["max_tokens"], "temperature": 0.0}


def seen(results):
    texts = [result.as_numpy("text_output")[0] for result in results]
    text = b"".join(text if isinstance(text, bytes) else text.encode() for text in texts).decode()
    prompt_tokens, completion_tokens = ([int(result.as_numpy(name)[0]) for result in results] for name in COUNTS)
    return {"text": text, "prompt_tokens": prompt_tokens[-1], "completion_tokens": sum(completion_tokens)}


class Stream:
    """A stream of requests, and what comes back."""

    def __init__(self, address):
        self.client = over_grpc.InferenceServerClient(address)
        self.responses = queue.Queue()
        self.client.start_stream(lambda result, error: self.responses.put((result, error)))

    def next(self):
        result, error = self.responses.get(timeout=PATIENCE_S)
        if error is not None:
            raise error
        return result

    def answer(self, model, given, **options):
        self.client.async_stream_infer(model, given, request_id="mine", **options)
        results = []
        while not results or not is_final(results[-1]):
            results.append(self.next())
            assert results[-1].get_response().id == "mine", results[-1].get_response()
        return results

    def close(self, cancel=False):
        self.client.stop_stream(cancel_requests=cancel)
        self.client.close()


def is_final(result):
    return result.get_response().parameters["triton_final_response"].bool_param


def streamed(given, ask):
    stream = Stream(given["grpc"])
    parts = stream.answer(given["model"], inputs(over_grpc, ask, streaming=True), parameters=parameters(ask))
    asked = of_vllm(over_grpc, ask, stream=True)
    *others, empty = stream.answer(given["model"], asked, enable_empty_final_response=True)
    assert empty.as_numpy("text_output") is None, empty.get_response()
    assert seen(others) == seen(parts), (seen(others), seen(parts))
    assert len(parts) == seen(parts)["completion_tokens"] + 1, "a response for every token and one for the end"
    (whole,) = stream.answer(given["model"], inputs(over_grpc, ask), parameters=parameters(ask))
    assert seen([whole]) == seen(parts), (seen([whole]), seen(parts))
    stream.close()
    return seen(parts)


def whole(given, ask):
    results = []
    for package, address in ((over_grpc, given["grpc"]), (over_http, given["http"])):
        client = package.InferenceServerClient(address)
        plain = inputs(package, ask)
        results.append(client.infer(given["model"], plain, request_id="mine", parameters=parameters(ask)))
        results.append(client.infer(given["model"], of_vllm(package, ask, stream=False), model_version="1"))
        client.close()
    results += [*in_json(given, ask), asyncio.run(with_asyncio(given, ask))]
    first, *others = (seen([result]) for result in results)
    assert all(other == first for other in others), (first, others)
    return first


def in_json(given, ask):
    """Returns two answers over HTTP: the inputs are in JSON, then the outputs are."""
    client = over_http.InferenceServerClient(given["http"])
    values = {"text_input": ask["prompt"], **{f"return_{name}": True for name in COUNTS}}
    texts = [tensor_in_json(name, value) for name, value in values.items()]
    outputs = [over_http.InferRequestedOutput(name, binary_data=False) for name in ("text_output", *COUNTS)]
    results = [
        client.infer(given["model"], texts, parameters=parameters(ask)),
        client.infer(given["model"], inputs(over_http, ask), outputs=outputs, parameters=parameters(ask)),
    ]
    assert "data" not in results[0].get_output("text_output"), results[0].get_response()
    assert "data" in results[1].get_output("text_output"), results[1].get_response()
    client.close()
    return results


async def with_asyncio(given, ask):
    client = over_aio.InferenceServerClient(given["http"])
    result = await client.infer(given["model"], inputs(over_http, ask), parameters=parameters(ask))
    await client.close()
    return result


def describe(given):
    """Health, metadata and configuration are the same over both protocols."""
    rpc, http = over_grpc.InferenceServerClient(given["grpc"]), over_http.InferenceServerClient(given["http"])
    model = given["model"]
    for client in (rpc, http):
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.is_model_ready(model)
        assert client.is_model_ready(model, "1")
        assert not client.is_model_ready("nothing")
    assert rpc.get_server_metadata(as_json=True) == http.get_server_metadata()
    names = [entry["name"] for entry in http.get_model_metadata(model)["inputs"]]
    assert [entry.name for entry in rpc.get_model_metadata(model).inputs] == names
    config = rpc.get_model_config(model).config
    assert config.model_transaction_policy.decoupled, config
    assert (config.max_batch_size, [entry.name for entry in config.input]) == (0, names), config
    assert [entry["name"] for entry in http.get_model_config(model)["input"]] == names
    rpc.close()
    http.close()


def refused(call, *arguments, **options):
    try:
        call(*arguments, **options)
    except InferenceServerException as error:
        return error.message()
    raise AssertionError("it was not refused")


def errors(given, ask):
    """Returns what a request that is too long is called, over both protocols and in a stream that goes on."""
    rpc, http = over_grpc.InferenceServerClient(given["grpc"]), over_http.InferenceServerClient(given["http"])
    long = {"max_tokens": given["too_long"]["max_tokens"]}
    said = refused(rpc.infer, given["model"], inputs(over_grpc, ask), parameters=long)
    assert refused(http.infer, given["model"], inputs(over_http, ask), parameters=long) == said
    assert "does not exist" in refused(rpc.infer, "nothing", inputs(over_grpc, ask))
    assert "temprature" in refused(rpc.infer, given["model"], inputs(over_grpc, ask, temprature="1"))
    stream = Stream(given["grpc"])
    assert refused(stream.answer, given["model"], inputs(over_grpc, ask, stream=True), parameters=long) == said
    assert seen(stream.answer(given["model"], inputs(over_grpc, ask), parameters=parameters(ask)))["text"]
    stream.close()
    rpc.close()
    http.close()
    return said


def cancel(given, ask):
    """A client that leaves in the middle of a stream gets nothing more."""
    stream = Stream(given["grpc"])
    stream.client.async_stream_infer(
        given["model"], inputs(over_grpc, ask, stream=True), parameters={"max_tokens": 1000, "ignore_eos": True}
    )
    assert stream.next().as_numpy("text_output") is not None
    stream.close(cancel=True)
    while not stream.responses.empty():
        result, error = stream.responses.get()
        assert error is None or "CANCELLED" in error.status(), error
        assert result is None or not is_final(result)


def main():
    given = json.load(sys.stdin)
    given["http"] = given["base_url"].removesuffix("/v1").removeprefix("http://")
    asks = [ask for ask in given["asks"] if "prompt" in ask]
    describe(given)
    answers = {ask["name"]: streamed(given, ask) if ask["stream"] else whole(given, ask) for ask in asks}
    cancel(given, asks[0])
    answers["too long"] = {"error": errors(given, asks[0]).split(" is ")[0]}
    json.dump(answers, sys.stdout)


main()
