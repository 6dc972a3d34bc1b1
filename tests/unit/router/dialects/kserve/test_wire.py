"""Our messages of KServe's protocol on the wire, read by stubs made of the published .proto files and by the schemas.

These are in a folder beside the checkout, which users do not have.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.descriptor import Descriptor

from router.dialects.kserve.description import model_metadata
from twostroke.rpc.v1 import kserve_pb2 as kserve

SPECS = Path(__file__).resolve().parents[6] / "shared" / "specs"
PUBLISHED = ("open_inference_grpc.proto", "triton_grpc_service.proto")
NO_CONFIG = 'syntax = "proto3"; package inference; message ModelConfig {}'
"""Triton's file of configurations is not among the published ones here: tritonclient itself checks those."""


@pytest.fixture(params=PUBLISHED)
def published(request: pytest.FixtureRequest, tmp_path: Path) -> descriptor_pool.DescriptorPool:
    if not (SPECS / request.param).is_file():
        pytest.skip(f"{SPECS / request.param} is not here")
    (tmp_path / "model_config.proto").write_text(NO_CONFIG)
    files = tmp_path / "files"
    command = ["-m", "grpc_tools.protoc", f"-I{SPECS}", f"-I{tmp_path}", "--include_imports"]
    subprocess.run([sys.executable, *command, f"--descriptor_set_out={files}", request.param], check=True)
    pool = descriptor_pool.DescriptorPool()
    for file in descriptor_pb2.FileDescriptorSet.FromString(files.read_bytes()).file:
        pool.Add(file)
    return pool


def messages(descriptors: Any) -> Iterator[Descriptor]:
    for descriptor in descriptors:
        yield descriptor
        yield from messages(descriptor.nested_types)


OURS = list(messages(kserve.DESCRIPTOR.message_types_by_name.values()))


def test_every_field_has_the_number_and_the_type_that_is_published(published: descriptor_pool.DescriptorPool) -> None:
    compared = 0
    for ours in OURS:
        try:
            theirs = published.FindMessageTypeByName(ours.full_name)
        except KeyError:
            continue
        if ours.name == "ModelConfig":
            continue
        for field in ours.fields:
            other = theirs.fields_by_name[field.name]
            assert (field.number, field.type, field.is_repeated) == (other.number, other.type, other.is_repeated)
            compared += 1
    assert compared > 50


def test_every_method_has_the_published_form(published: descriptor_pool.DescriptorPool) -> None:
    theirs = published.FindServiceByName("inference.GRPCInferenceService").methods_by_name
    ours = kserve.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods_by_name
    for name in {*theirs} & {*ours}:
        for part in ("input_type", "output_type"):
            assert getattr(ours[name], part).full_name == getattr(theirs[name], part).full_name
        for streams in ("client_streaming", "server_streaming"):
            assert getattr(ours[name], streams) == getattr(theirs[name], streams)


def test_what_we_write_is_read_by_published_stubs_and_the_other_way_round(
    published: descriptor_pool.DescriptorPool,
) -> None:
    parameters = {"flag": kserve.InferParameter(bool_param=True), "text": kserve.InferParameter(string_param="a")}
    request = kserve.ModelInferRequest(model_name="m", id="mine", parameters=parameters, raw_input_contents=[b"abc"])
    tensor = request.inputs.add(name="text_input", datatype="BYTES", shape=[1])
    tensor.contents.MergeFrom(kserve.InferTensorContents(bool_contents=[True], bytes_contents=[b"a"]))
    response = kserve.ModelInferResponse(model_name="m", id="mine", raw_output_contents=[b"abc"])
    response.outputs.add(name="n", datatype="UINT32", shape=[1]).contents.uint_contents.append(7)
    for message in (request, response, kserve.ModelMetadataResponse(**model_metadata("m"))):
        kind = message_factory.GetMessageClass(published.FindMessageTypeByName(message.DESCRIPTOR.full_name))
        theirs = kind.FromString(message.SerializeToString())
        assert str(theirs) == str(message)
        assert type(message).FromString(theirs.SerializeToString()) == message


async def test_bodies_over_http_have_the_published_schemas(app) -> None:
    file = SPECS / "generate_rest.yaml"
    if not file.is_file():
        pytest.skip(f"{file} is not here")
    published = yaml.safe_load(file.read_text())
    _, http = app

    def check(name: str, body: Any) -> None:
        jsonschema.validate(body, {**published, "$ref": f"#/components/schemas/{name}"})

    for parameters in ({}, {"details": True}, {"details": True, "stop": ["l"], "logprobs": 2}):
        asked = {"text_input": "abc", "parameters": parameters}
        check("GenerateRequest", asked)
        check("GenerateResponse", (await http.post("/v2/models/toy/versions/1/generate", json=asked)).json())
        events = (await http.post("/v2/models/toy/versions/1/generate_stream", json=asked)).text.split("\n\n")[:-1]
        for event in events:
            check("GenerateStreamResponse", json.loads(event.removeprefix("data: ")))
    check("GenerateErrorResponse", (await http.post("/v2/models/toy/versions/1/generate", json={})).json())
    with pytest.raises(jsonschema.ValidationError):
        check("GenerateResponse", {"text_output": 7})
