"""Tests of whose prefixes are whose: salts are made of what the gateway says and the client's own; some are
everybody's."""

from __future__ import annotations

import json
from pathlib import Path

import grpc.aio
import httpx
import pytest

from router.endpoints.app import build_http_app
from router.metrics import RouterMetrics
from router.preparation.preparer import read_public_prefixes
from router.requests.request_handler import RequestHandler
from router.text.prompts import PublicPrefixes
from router.text.tokenizer import ByteText
from tests.inline_preparer import InlinePreparer
from tests.unit.router.conftest import ScriptedDispatcher
from twostroke.base.errors import ConfigError
from twostroke.kv_cache.block import exact_salt, owner_salt
from twostroke.kv_cache.form import KvForm
from twostroke.rpc.v1 import inference_pb2, inference_pb2_grpc

TEXT = "/v1/completions"


async def test_a_salt_is_made_of_the_gateways_tenant_and_the_clients_salt_but_not_of_its_user(frontend) -> None:
    acme = {"X-Tenant-Id": "acme"}
    await frontend.http.post(TEXT, json={"prompt": "a", "cache_salt": "s"}, headers=acme)
    await frontend.http.post(TEXT, json={"prompt": "a", "user": "jo"}, headers=acme)
    await frontend.http.post(TEXT, json={"prompt": "a", "user": "jo"})
    request = inference_pb2.GenerateRequest(text="a", tenant="acme", cache_salt="s")
    async for _ in inference_pb2_grpc.InferenceStub(frontend.channel).Generate(request):
        pass
    both = owner_salt("acme", b"s")
    assert [each.salt for each in frontend.dispatcher.requests] == [both, owner_salt("acme", b""), b"", both]
    assert [each.routing.tenant for each in frontend.dispatcher.parents] == ["acme", "acme", "127.0.0.1", "acme"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (TEXT, {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/responses", {"input": "a"}),
    ],
)
async def test_a_prompt_cache_key_is_a_hint_of_its_tenant_and_never_a_salt(frontend, path: str, body: dict) -> None:
    for key, tenant in (("k", "acme"), ("k", "acme"), ("k", "other"), ("l", "acme"), (None, "acme")):
        got = await frontend.http.post(path, json=body | {"prompt_cache_key": key}, headers={"X-Tenant-Id": tenant})
        assert got.status_code == 200
    request = inference_pb2.GenerateRequest(text="a", prompt_cache_key="k", tenant="acme")
    async for _ in inference_pb2_grpc.InferenceStub(frontend.channel).Generate(request):
        pass
    first, again, of_another, of_another_key, without, over_grpc = frontend.dispatcher.parents
    assert first.routing.cache_key == again.routing.cache_key == over_grpc.routing.cache_key
    assert len({each.routing.cache_key for each in (first, of_another, of_another_key, without)}) == 4
    assert without.routing.cache_key == b""
    assert (
        first.request.salt
        == of_another_key.request.salt
        == without.request.salt
        == over_grpc.request.salt
        == owner_salt("acme", b"")
    )


@pytest.mark.parametrize(("form", "is_apart"), [(KvForm("int8", "bfloat16"), True), (KvForm("int8"), False)])
async def test_a_request_for_exact_pages_shares_none_with_others_where_pages_are_converted(
    frontend, form: KvForm, is_apart: bool
) -> None:
    frontend.limit(kv_form=form)
    acme = {"X-Tenant-Id": "acme"}
    for exactness in ("exact", "any"):
        await frontend.http.post(TEXT, json={"prompt": "a", "kv_exactness": exactness}, headers=acme)
        request = inference_pb2.GenerateRequest(text="a", tenant="acme", kv_exactness=exactness)
        async for _ in inference_pb2_grpc.InferenceStub(frontend.channel).Generate(request):
            pass
    await frontend.http.post(TEXT, json={"prompt": "a"}, headers=acme)
    plain = owner_salt("acme", b"")
    apart = exact_salt(plain) if is_apart else plain
    assert [each.salt for each in frontend.dispatcher.requests] == [apart, apart, plain, plain, plain]
    assert [each.routing.takes_converted for each in frontend.dispatcher.parents] == [False, False, True, True, True]
    request = inference_pb2.GenerateRequest(text="a", kv_exactness="Exact")
    with pytest.raises(grpc.aio.AioRpcError, match=r'kv_exactness must be "exact" or "any", got .Exact.'):
        await anext(aiter(inference_pb2_grpc.InferenceStub(frontend.channel).Generate(request)))


async def test_who_may_propose_tokens_is_the_clients_to_narrow(frontend) -> None:
    for said in ({}, {"speculation": "off"}, {"speculation": "suffix"}):
        await frontend.http.post(TEXT, json={"prompt": "a", **said})
        request = inference_pb2.GenerateRequest(text="a", **said)
        async for _ in inference_pb2_grpc.InferenceStub(frontend.channel).Generate(request):
            pass
    wanted = ["auto", "auto", "off", "off", "suffix", "suffix"]
    assert [each.speculation for each in frontend.dispatcher.requests] == wanted
    request = inference_pb2.GenerateRequest(text="a", speculation="fast")
    with pytest.raises(
        grpc.aio.AioRpcError, match=r"one of auto, off, .*, suffix, or model where a draft model is served, got .fast."
    ):
        await anext(aiter(inference_pb2_grpc.InferenceStub(frontend.channel).Generate(request)))


def test_blocks_wholly_in_what_a_prompt_shares_with_a_public_prefix_are_public() -> None:
    public = PublicPrefixes([range(40), [0, 1, 2, 3, 9]])
    assert public.blocks_of([*range(40), 7], 16) == 2
    assert public.blocks_of([*range(33), 7, 7], 16) == 2
    assert public.blocks_of(range(15), 16) == 0
    assert public.blocks_of([0, 1, 2, 3, 9, 9], 4) == 1
    assert public.blocks_of([1, *range(40)], 1) == 0
    assert PublicPrefixes().blocks_of(range(40), 16) == 0


async def test_a_prefix_is_a_text_or_a_chat_that_prompts_begin_with(tmp_path: Path, frontend) -> None:
    text, chat = tmp_path / "text.txt", tmp_path / "chat.json"
    text.write_text("You are a ship.")
    chat.write_text(json.dumps({"messages": [{"role": "system", "content": "Be brief and kind."}]}))
    public = read_public_prefixes([str(text), str(chat)], ByteText())
    messages = [{"role": "system", "content": "Be brief and kind."}, {"role": "user", "content": "hi"}]
    await frontend.http.post("/v1/chat/completions", json={"messages": messages})
    assert public.blocks_of(frontend.dispatcher.requests[0].prompt, 1) == len("system: Be brief and kind.\n")
    assert public.blocks_of(list(b"You are a ship. Sail!"), 1) == len("You are a ship.")


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("a.json", b"[]", "must be a JSON object"),
        ("a.json", b"{}", "messages must be a list"),
        ("a.txt", b"\xff", "can't decode"),
        ("a.txt", None, "No such file"),
    ],
)
def test_a_prefix_that_cannot_be_read_is_named(tmp_path: Path, name: str, content: bytes | None, why: str) -> None:
    file = tmp_path / name
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=why) as refused:
        read_public_prefixes([str(file)], ByteText())
    assert name in refused.value.message
    assert refused.value.field == "--public-prefix"


async def test_a_grammar_is_compiled_in_the_turns_of_the_tenant_and_no_user_has_turns_of_its_own() -> None:
    preparer = InlinePreparer(ByteText())
    handler = RequestHandler(ScriptedDispatcher(), preparer, RouterMetrics(), model="toy")
    transport = httpx.ASGITransport(build_http_app(handler, max_body_bytes=1 << 16))
    async with httpx.AsyncClient(transport=transport, base_url="http://toy") as http:
        for number, headers in enumerate(({}, {}, {"X-Tenant-Id": "acme"})):
            body = {"prompt": "a", "user": f"u{number}", "structured_outputs": {"regex": "a" * (number + 1)}}
            await http.post(TEXT, json=body, headers=headers)
    assert preparer.compiled_for == ["127.0.0.1", "127.0.0.1", "acme"]
