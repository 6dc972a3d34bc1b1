"""`infer` of KServe's protocol over HTTP, with tensors in JSON."""

from __future__ import annotations

import pytest

INFER = "/v2/models/toy/infer"


def tensor(name, value, **changed):
    datatype = "BOOL" if isinstance(value, bool) else "BYTES"
    return {"name": name, "datatype": datatype, "shape": [1], "data": [value], **changed}


TEXT = tensor("text_input", "abc")


async def test_a_whole_answer_comes_as_tensors(app):
    _, http = app
    body = {"id": "mine", "inputs": [TEXT], "parameters": {"max_tokens": 2, "binary_data_output": True}}
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
        ({"inputs": [tensor("text_input", "abc", parameters={"binary_data_size": 7})]}, "binary_data=False"),
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


async def test_tensors_in_binary_are_refused_in_words_that_help(app):
    _, http = app
    headers = {"Inference-Header-Content-Length": "2"}
    answer = await http.post(INFER, content=b"{}\x03\x00\x00\x00abc", headers=headers)
    assert answer.status_code == 400
    assert "binary_data=False" in answer.json()["error"]
