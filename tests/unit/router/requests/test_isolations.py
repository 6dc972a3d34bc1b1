"""No two requests share blocks that differ in tenant, salt, adapter or exactness, in whatever dialect they come."""

from __future__ import annotations

import itertools
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from router.adapters.named_adapter import NamedAdapter, adapter_salt
from router.text.prompts import PublicPrefixes
from router.text.tokenizer import TokenizerText
from tests.trials.chaos.neighbours.site import write_tokenizer
from tests.unit.router.conftest import Frontend, open_frontend
from twostroke.config import EndpointsConfig
from twostroke.kv_cache.block import block_hashes_of, exact_salt, owner_salt
from twostroke.kv_cache.form import KvForm
from twostroke.request import WeightsRef
from twostroke.rpc.v1 import inference_pb2, inference_pb2_grpc, kserve_pb2
from twostroke.rpc.v1.kserve_pb2_grpc import GRPCInferenceServiceStub

TENANTS, SALTS, MODELS, EXACTNESS = ("", "acme", "other"), ("", "s"), ("toy", "fr", "de"), ("any", "exact")
Apart = tuple[str, str, str, str]
CASES: tuple[Apart, ...] = tuple(itertools.product(TENANTS, SALTS, MODELS, EXACTNESS))
PROMPT = "Once upon a time there was a ship"
Ask = Callable[[Frontend, Apart, str], Awaitable[None]]


def headers(tenant: str) -> dict[str, str]:
    return {"x-tenant-id": tenant} if tenant else {}


def fields(case: Apart) -> dict[str, Any]:
    _, salt, model, exactness = case
    return {"model": model, "kv_exactness": exactness, **({"cache_salt": salt} if salt else {})}


def posting(path: str, body: Callable[[str], dict[str, Any]]) -> Ask:
    async def ask(frontend: Frontend, case: Apart, prompt: str) -> None:
        answer = await frontend.http.post(path, json=fields(case) | body(prompt), headers=headers(case[0]))
        assert answer.status_code == 200, answer.text

    return ask


async def generate(frontend: Frontend, case: Apart, prompt: str) -> None:
    request = inference_pb2.GenerateRequest(text=prompt, tenant=case[0], **fields(case))
    async for _ in inference_pb2_grpc.InferenceStub(frontend.channel).Generate(request):
        pass


async def infer_by_kserve(frontend: Frontend, case: Apart, prompt: str) -> None:
    tenant, salt, model, exactness = case
    request = kserve_pb2.ModelInferRequest(model_name=model)
    sampling = json.dumps({"kv_exactness": exactness, **({"cache_salt": salt} if salt else {})})
    for name, value in (("text_input", prompt), ("sampling_parameters", sampling)):
        contents = request.inputs.add(name=name, datatype="BYTES", shape=[1]).contents
        contents.bytes_contents.append(value.encode())
    await GRPCInferenceServiceStub(frontend.channel).ModelInfer(request, metadata=tuple(headers(tenant).items()))


async def generate_by_kserve(frontend: Frontend, case: Apart, prompt: str) -> None:
    tenant, salt, model, exactness = case
    parameters = {"kv_exactness": exactness, **({"cache_salt": salt} if salt else {})}
    body = {"text_input": prompt, "parameters": parameters}
    answer = await frontend.http.post(f"/v2/models/{model}/generate", json=body, headers=headers(tenant))
    assert answer.status_code == 200, answer.text


def chat_of(prompt: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": prompt}], "max_tokens": 5}


DIALECTS: dict[str, Ask] = {
    "completions": posting("/v1/completions", lambda prompt: {"prompt": prompt}),
    "chat": posting("/v1/chat/completions", chat_of),
    "responses": posting("/v1/responses", lambda prompt: {"input": prompt}),
    "anthropic": posting("/v1/messages", chat_of),
    "grpc": generate,
    "kserve over grpc": infer_by_kserve,
    "kserve over http": generate_by_kserve,
}


def serve_adapters(frontend: Frontend) -> None:
    """Serves two adapters, and pages that were converted: those who insist on exact ones share none."""
    frontend.limit(kv_form=KvForm("int8", "bfloat16"))
    frontend.dispatcher.named_models = {
        name: NamedAdapter(name, WeightsRef(name.encode() * 8), 8, 1000, 0.0) for name in MODELS[1:]
    }


@pytest.fixture
def apart(frontend: Frontend) -> Frontend:
    serve_adapters(frontend)
    return frontend


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_no_two_requests_share_blocks_that_differ_in_anything_that_keeps_blocks_apart(
    apart: Frontend, dialect: str
) -> None:
    for case in CASES:
        await DIALECTS[dialect](apart, case, PROMPT)
    asked = apart.dispatcher.requests
    assert [each.hint_tenant for each in asked] == [tenant for tenant, *_ in CASES]
    firsts = [block_hashes_of(each.prompt, 16, each.salt)[0] for each in asked]
    shared = [pair for pair in itertools.combinations(range(len(CASES)), 2) if firsts[pair[0]] == firsts[pair[1]]]
    assert [(CASES[one], CASES[other]) for one, other in shared] == []
    assert [each.weights is None for each in asked] == [model == "toy" for _, _, model, _ in CASES]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> TokenizerText:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return TokenizerText(folder)


LONG = ("<|im_end|>\n<|im_start|>user\n" + "the ship of the fleet " * 48) * 4


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_text_that_was_prepared_is_found_by_its_tenant_with_its_salt_and_by_nobody_else(
    dialect: str, text: TokenizerText
) -> None:
    endpoints = EndpointsConfig(max_request_bytes=1 << 16)
    async with open_frontend(endpoints, text=text) as frontend:
        serve_adapters(frontend)
        frontend.limit(max_model_len=1 << 14, pool_tokens=1 << 14, vocab_size=5000)
        seen: set[tuple[str, str]] = set()
        for tenant, salt, kind in itertools.product(TENANTS, SALTS, (("toy", "any"), ("fr", "exact"))):
            case = (tenant, salt, *kind)
            before = frontend.metrics.registry.get_sample_value("twostroke_text_cache_hits_total", {"role": "router"})
            await DIALECTS[dialect](frontend, case, LONG)
            after = frontend.metrics.registry.get_sample_value("twostroke_text_cache_hits_total", {"role": "router"})
            assert (after != before) is (case[:2] in seen), case
            seen.add(case[:2])
        assert len({tuple(each.prompt) for each in frontend.dispatcher.requests}) == 1


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_public_blocks_are_public_for_the_model_alone_and_never_where_pages_must_be_exact(
    apart: Frontend, dialect: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PublicPrefixes, "blocks_of", lambda self, prompt, block_size: 1)
    cases = [("acme", "s", model, exactness) for model in MODELS for exactness in EXACTNESS]
    for case in cases:
        await DIALECTS[dialect](apart, case, PROMPT)
    public = [each.public_blocks for each in apart.dispatcher.requests]
    assert public == [1, 0, 0, 0, 0, 0]


def test_a_salt_depends_on_every_part_that_it_is_made_of() -> None:
    """Whatever is put around whatever else."""
    owners = [owner_salt(tenant, salt.encode()) for tenant in TENANTS for salt in SALTS]
    exact = [exact_salt(salt) for salt in owners]
    adapted = [adapter_salt(salt, adapter * 16) for salt in (*owners, *exact) for adapter in (b"a", b"b")]
    everything = [*owners, *exact, *adapted]
    assert len(set(everything)) == len(everything)
    assert adapter_salt(b"ab", b"c") != adapter_salt(b"a", b"bc")
