"""`infer` of KServe's protocol over HTTP, with tensors in JSON and as bytes behind it."""

from __future__ import annotations

import json
import struct

import pytest

INFER = "/v2/models/toy/infer"
LENGTH = "Inference-Header-Content-Length"


def tensor(name, value, **changed):
    datatype = "BOOL" if isinstance(value, bool) else "BYTES"
    return {"name": name, "datatype": datatype, "shape": [1], "data": [value], **changed}


def in_bytes(name, value, size=None, **changed):
    """Returns a tensor's entry in the JSON, and its bytes. `size`: what the entry says of them instead."""
    raw = bytes([value]) if isinstance(value, bool) else struct.pack("<I", len(value)) + value.encode()
    entry = tensor(name, value, parameters={"binary_data_size": len(raw) if size is None else size}, **changed)
    return {key: entry[key] for key in entry if key != "data" or "data" in changed}, raw


def framed(body, *raws):
    """Returns what a client posts that has bytes after the JSON."""
    head = json.dumps(body).encode()
    return {"content": head + b"".join(raws), "headers": {LENGTH: str(len(head))}}


def outputs_of(answer):
    """Returns every output's bytes, or its values where they are in the JSON."""
    length = int(answer.headers[LENGTH])
    head, left, found = json.loads(answer.content[:length]), answer.content[length:], {}
    for output in head["outputs"]:
        size = output.get("parameters", {}).get("binary_data_size")
        found[output["name"]] = output["data"] if size is None else left[:size]
        left = left[size or 0 :]
    assert left == b"", "bytes that belong to no output"
    return found


TEXT = tensor("text_input", "abc")


async def test_a_whole_answer_comes_as_tensors(app):
    _, http = app
    body = {"id": "mine", "inputs": [TEXT], "parameters": {"max_tokens": 2, "binary_data_output": False}}
    for path in (INFER, "/v2/models/toy/versions/1/infer"):
        answer = await http.post(path, json=body)
        assert answer.status_code == 200
        assert answer.json() == {
            "id": "mine",
            "model_name": "toy",
            "model_version": "1",
            "outputs": [
                {"name": "text_output", "datatype": "BYTES", "shape": [1], "data": ["he"]},
                {"name": "finish_reason", "datatype": "BYTES", "shape": [1], "data": ["length"]},
            ],
        }


async def test_inputs_of_the_vllm_backend_and_named_outputs(app):
    _, http = app
    sampling = tensor("sampling_parameters", '{"max_tokens": "3"}', shape=[1, 1], data=[['{"max_tokens": "3"}']])
    body = {"inputs": [TEXT, sampling, tensor("stream", False)], "outputs": [{"name": "num_output_tokens"}]}
    answer = (await http.post(INFER, json=body)).json()
    assert answer["outputs"] == [{"name": "num_output_tokens", "datatype": "UINT32", "shape": [1], "data": [3]}]
    del body["outputs"]
    (output,) = (await http.post(INFER, json=body)).json()["outputs"]
    assert output["data"] == ["abchel"]


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({}, "text_input"),
        ({"inputs": "abc"}, "inputs"),
        ({"inputs": ["abc"]}, "inputs"),
        ({"inputs": [TEXT] * 65}, "inputs"),
        ({"inputs": [TEXT, TEXT]}, "text_input"),
        ({"inputs": [{}]}, "no input ''"),
        ({"inputs": [tensor("image", "abc")]}, "image"),
        ({"inputs": [tensor("text_input", "abc", shape=[2])]}, "shape"),
        ({"inputs": [tensor("text_input", "abc", shape=None)]}, "shape"),
        ({"inputs": [tensor("text_input", "abc", shape="1")]}, "shape"),
        ({"inputs": [tensor("text_input", "abc", datatype="FP32")]}, "BYTES"),
        ({"inputs": [tensor("text_input", "abc", data=["a", "b"])]}, "text_input"),
        ({"inputs": [tensor("text_input", "abc", data=None)]}, "text_input"),
        ({"inputs": [tensor("text_input", "abc", data=[7])]}, "text_input"),
        ({"inputs": [tensor("text_input", "abc", parameters={"binary_data_size": 7})]}, "both data"),
        ({"inputs": [in_bytes("text_input", "abc")[0]]}, "7 bytes after the JSON"),
        ({"inputs": [in_bytes("text_input", "abc", size="7")[0]]}, "a number of bytes"),
        ({"inputs": [in_bytes("text_input", "abc", size=-1)[0]]}, "a number of bytes"),
        ({"inputs": [tensor("text_input", "abc", parameters={"shared_memory_region": "r"})]}, "shared_memory_region"),
        ({"inputs": [TEXT], "outputs": [{"name": "text_output", "parameters": {"classification": 1}}]}, "classifi"),
        ({"inputs": [TEXT], "outputs": [{"name": "text_output", "parameters": {"binary_data": "x"}}]}, "binary_data"),
        ({"inputs": [TEXT], "parameters": {"binary_data_output": "x"}}, "binary_data_output"),
        ({"inputs": [TEXT, tensor("streaming", True)]}, "streaming"),
        ({"inputs": [TEXT], "outputs": [{"name": "logits"}]}, "logits"),
        ({"inputs": [TEXT], "parameters": {"max_tokens": 0}}, "max_tokens"),
    ],
)
async def test_what_is_wrong_is_named_in_one_line(app, body, named):
    dispatcher, http = app
    answer = await http.post(INFER, json=body)
    assert answer.status_code == 400
    assert named in answer.json()["error"]
    assert dispatcher.requests == []


async def test_inputs_come_as_bytes_behind_the_json_and_outputs_go_there_where_the_client_says_so(app):
    dispatcher, http = app
    text, raw = in_bytes("text_input", "grüße")
    raw = raw.replace(b"\x05", b"\x07", 1)  # the length is one of bytes
    text["parameters"]["binary_data_size"] = len(raw)
    flag, flag_raw = in_bytes("return_num_output_tokens", True)
    body = {"inputs": [text, tensor("stream", False), flag], "parameters": {"max_tokens": 2}}
    for default, named, binary in (
        (True, {}, {"text_output", "num_output_tokens"}),
        (False, {"text_output": True, "num_output_tokens": None}, {"text_output"}),
        (True, {"text_output": None, "num_output_tokens": False}, {"text_output"}),
    ):
        said = [{"name": name, "parameters": {"binary_data": value}} for name, value in named.items()]
        body |= {"outputs": said, "parameters": {"max_tokens": 2, "binary_data_output": default}}
        answer = await http.post(INFER, **framed(body, raw, flag_raw))
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"] == "application/octet-stream"
        found = outputs_of(answer)
        assert found["text_output"] == struct.pack("<I", 9) + "grüßehe".encode()
        assert found["num_output_tokens"] == (struct.pack("<I", 2) if "num_output_tokens" in binary else [2])
    assert bytes(dispatcher.requests[0].prompt).decode() == "grüße"


@pytest.mark.parametrize(
    ("raw", "named"),
    [
        (b"\x03\x00\x00\x00ab", "where only 6 are left"),
        (b"\x04\x00\x00\x00abc", "after its length"),
        (b"\x03\x00\x00\x00ab\xff", "UTF-8"),
        (b"\x03\x00\x00\x00abc\x00", "1 bytes after the JSON belong to no input"),
    ],
)
async def test_bytes_that_are_no_input_are_refused_by_name(app, raw, named):
    dispatcher, http = app
    answer = await http.post(INFER, **framed({"inputs": [in_bytes("text_input", "abc")[0]]}, raw))
    assert (answer.status_code, dispatcher.requests) == (400, [])
    assert named in answer.json()["error"]


@pytest.mark.parametrize("length", ["0", "-1", "x", "3", "9" * 30, "1.0"])
async def test_a_length_of_the_json_that_cannot_be_is_refused(app, length):
    _, http = app
    answer = await http.post(INFER, content=b"{}", headers={LENGTH: length})
    assert answer.status_code == 400
    assert "a number from 1 to 2" in answer.json()["error"]


async def test_bytes_behind_the_json_are_refused_where_no_tensors_come(app):
    _, http = app
    body = framed({"text_input": "abc"}, b"abc")
    for path in ("/v2/models/toy/generate", "/v1/completions", "/tokenize"):
        answer = await http.post(path, **body)
        assert answer.status_code == 415
        assert "JSON alone" in answer.text


async def test_a_body_of_bytes_may_say_so_and_a_packed_one_is_refused_by_name(app):
    _, http = app
    body = json.dumps({"inputs": [TEXT]}).encode()
    plain = await http.post(INFER, content=body, headers={"Content-Type": "application/octet-stream"})
    assert plain.status_code == 200
    packed = await http.post(INFER, content=body, headers={"Content-Encoding": "gzip"})
    assert packed.status_code == 415
    assert "gzip" in packed.json()["error"]
