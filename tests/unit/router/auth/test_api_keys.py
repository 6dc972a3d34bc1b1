"""Doors that ask for a key: over real sockets, with a script instead of workers behind them."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc
import grpc.aio
import pytest
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc
from openai import AsyncOpenAI, AuthenticationError, RateLimitError
from prometheus_client import generate_latest

from router.auth import key_authenticator as authenticator
from router.auth.api_keys import KeyEntry, NewKey, draw_key, find_key, parse_keys
from router.auth.key_authenticator import KeyAuthenticator
from router.metrics import RouterMetrics
from tests.unit.router.conftest import Frontend, open_frontend
from twostroke.base.errors import ConfigError, InvalidApiKey
from twostroke.config import EndpointsConfig
from twostroke.kv_cache.block import owner_salt
from twostroke.rpc.v1 import control_pb2, control_pb2_grpc, inference_pb2, kserve_pb2
from twostroke.rpc.v1.inference_pb2_grpc import InferenceStub
from twostroke.rpc.v1.kserve_pb2_grpc import GRPCInferenceServiceStub

TEXT = "/v1/completions"
ACME, OTHER, SINGLE, SLOW, THIRSTY, GONE, OLD, FIRST = (draw_key() for _ in range(8))
ENTRIES = {
    ACME: {"tenant": "acme"},
    OTHER: {"tenant": "other"},
    SINGLE: {"tenant": "single", "concurrency": 1},
    SLOW: {"tenant": "slow", "requests_per_minute": 2},
    THIRSTY: {"tenant": "thirsty", "tokens_per_minute": 3},
    GONE: {"tenant": "gone", "disabled": True},
    FIRST: {"tenant": "first", "max_priority": 5, "concurrency": 4},
    OLD: {"tenant": "old", "expires": "2020-01-31"},
}


def write(path: Path, *keys: NewKey) -> None:
    """At once: a router may be reading."""
    entries = {key.id: {"sha256": key.sha256, **ENTRIES[key]} for key in keys}
    draft = path.with_suffix(".draft")
    draft.write_text(yaml.safe_dump({"keys": entries}))
    draft.replace(path)


def shown(key: NewKey | str) -> dict[str, str]:
    return {"authorization": f"Bearer {key if isinstance(key, str) else key.key}"}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "keys.yaml"
    write(path, *ENTRIES)
    return path


@pytest.fixture
async def guarded(file: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Frontend]:
    monkeypatch.setattr(authenticator, "LOOK_S", 0.01)
    async with open_frontend(EndpointsConfig(api_keys=str(file))) as frontend:
        yield frontend


def refusals(frontend: Frontend, reason: str) -> float | None:
    labels = {"role": "router", "reason": reason}
    return frontend.metrics.registry.get_sample_value("twostroke_api_key_refusals_total", labels)


def generate(frontend: Frontend, key: NewKey | None, **fields: object) -> grpc.aio.UnaryStreamCall:  # type: ignore[type-arg]
    request = inference_pb2.GenerateRequest(text="a", **fields)  # type: ignore[arg-type]
    return InferenceStub(frontend.channel).Generate(request, metadata=tuple(shown(key).items()) if key else None)


async def code_of(call: grpc.aio.Call) -> grpc.StatusCode:
    """When all that it says has been read."""
    if isinstance(call, grpc.aio.UnaryStreamCall):
        with contextlib.suppress(grpc.aio.AioRpcError):
            async for _ in call:
                pass
    return await call.code()  # type: ignore[no-any-return]


WRONG = f"ts-{ACME.id}-{'0' * 64}"
UNKNOWN = f"ts-{'0' * 12}-{'0' * 64}"


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        (None, "missing"),
        ("Basic abc", "malformed"),
        ("Bearer sk-123", "malformed"),
        (f"Bearer {WRONG}", "wrong"),
        (f"Bearer {UNKNOWN}", "wrong"),
        (f"Bearer {GONE.key}", "revoked"),
        (f"Bearer {OLD.key}", "expired"),
    ],
    ids=["none", "basic", "short", "wrong secret", "unknown", "revoked", "expired"],
)
async def test_without_a_good_key_both_doors_refuse(guarded: Frontend, header: str | None, reason: str) -> None:
    answer = await guarded.http.post(TEXT, json={"prompt": "a"}, headers={"authorization": header} if header else {})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["type"]) == (401, "invalid_api_key", "invalid_request_error")
    assert answer.headers["www-authenticate"] == "Bearer"
    metadata = (("authorization", header),) if header else None
    call = InferenceStub(guarded.channel).Generate(inference_pb2.GenerateRequest(text="a"), metadata=metadata)
    assert await code_of(call) is grpc.StatusCode.UNAUTHENTICATED
    assert guarded.dispatcher.requests == []
    assert refusals(guarded, reason) == 2


CALLS = [
    ("/v1/completions", {"prompt": "a"}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    ("/v1/responses", {"input": "a"}),
    ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 5}),
    ("/v2/models/toy/generate", {"text_input": "a"}),
    ("/tokenize", {"prompt": "a"}),
    ("/nowhere", {}),
]
"""A call of each dialect over HTTP."""


@pytest.mark.parametrize(
    "bad",
    [WRONG, UNKNOWN, GONE.key, OLD.key, "sk-mine-of-elsewhere"],
    ids=["wrong secret", "unknown", "revoked", "expired", "of elsewhere"],
)
@pytest.mark.parametrize("header", ["authorization", "x-api-key"])
async def test_no_log_answer_or_metric_has_a_key_that_was_refused(
    guarded: Frontend, caplog: pytest.LogCaptureFixture, bad: str, header: str
) -> None:
    caplog.set_level(logging.DEBUG)
    shown_as = {header: bad if header == "x-api-key" else f"Bearer {bad}"}
    told = ""
    for path, body in CALLS:
        answer = await guarded.http.post(path, json=body, headers=shown_as)
        assert answer.status_code == 401
        told += f"{answer.text} {answer.headers}"
    for method in ("/twostroke.v1.Inference/Generate", "/inference.GRPCInferenceService/ModelInfer"):
        call = guarded.channel.unary_unary(method)(b"", metadata=tuple(shown_as.items()))
        assert await code_of(call) is grpc.StatusCode.UNAUTHENTICATED
        told += str(await call.details())
    told += generate_latest(guarded.metrics.registry).decode()
    told += "".join(f"{record.getMessage()} {record.args} {record.exc_text}" for record in caplog.records)
    assert bad.rpartition("-")[2] not in told


async def test_no_log_has_a_key_that_is_good_or_has_used_up_its_limit(
    guarded: Frontend, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    codes = [(await guarded.http.post(TEXT, json={"prompt": "a"}, headers=shown(SLOW))).status_code for _ in range(3)]
    assert codes == [200, 200, 429]
    assert await code_of(generate(guarded, SLOW)) is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert await code_of(generate(guarded, ACME)) is grpc.StatusCode.OK
    told = "".join(f"{record.getMessage()} {record.args} {record.exc_text}" for record in caplog.records)
    assert [key.id for key in (SLOW, ACME) if key.key.rpartition("-")[2] in told] == []


async def test_openais_client_understands_what_it_is_told(guarded: Frontend) -> None:
    async def ask(key: str) -> str:
        async with AsyncOpenAI(base_url=f"{guarded.url}/v1", api_key=key, max_retries=0, timeout=60) as client:
            return (await client.completions.create(model="toy", prompt="a")).choices[0].text

    assert await ask(ACME.key) == "hello"
    with pytest.raises(AuthenticationError):
        await ask(WRONG)
    assert [await ask(SLOW.key) for _ in range(2)] == ["hello"] * 2
    with pytest.raises(RateLimitError) as refused:
        await ask(SLOW.key)
    assert refused.value.code == "rate_limit_exceeded"
    assert 1 <= int(refused.value.response.headers["retry-after"]) <= 30


async def test_every_call_of_clients_needs_a_key_and_health_does_not(guarded: Frontend) -> None:
    for path in ("/v1/models", "/v1/models/toy", "/nowhere"):
        assert (await guarded.http.get(path)).status_code == 401
    for path in ("/tokenize", "/detokenize", "/v1/chat/completions"):
        assert (await guarded.http.post(path, json={})).status_code == 401
    assert (await guarded.http.get("/v1/models", headers=shown(ACME))).status_code == 200
    for path in ("/health", "/ready", "/live"):
        assert (await guarded.http.get(path)).status_code == 200
    assert (await guarded.http.get("/metrics")).status_code == 404, "what is said there is not for clients"
    for method in inference_pb2.DESCRIPTOR.services_by_name["Inference"].methods:
        path = f"/{method.containing_service.full_name}/{method.name}"
        calls = guarded.channel.unary_stream if method.server_streaming else guarded.channel.unary_unary
        assert await code_of(calls(path)(b"")) is grpc.StatusCode.UNAUTHENTICATED, method.name
    health = health_pb2_grpc.HealthStub(guarded.channel)
    assert (await health.Check(health_pb2.HealthCheckRequest(service="live"))).status == 1
    control = control_pb2_grpc.ControlStub(guarded.channel).Drain(
        control_pb2.DrainRequest(deadline_s=0), metadata=tuple(shown(ACME).items())
    )
    assert await code_of(control) is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize("leaves", [False, True], ids=["the stream ends", "the client goes away"])
async def test_a_call_too_many_is_refused_until_another_ends(guarded: Frontend, leaves: bool) -> None:
    guarded.dispatcher.stalls = leaves
    body = {"prompt": "a", "stream": True}
    asking = asyncio.create_task(guarded.http.post(TEXT, json=body, headers=shown(SINGLE)))
    if leaves:
        await guarded.dispatcher.stalled.wait()
        refused = await guarded.http.post(TEXT, json=body, headers=shown(SINGLE))
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert await code_of(generate(guarded, SINGLE)) is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert refusals(guarded, "concurrency") == 2
        asking.cancel()
        await guarded.dispatcher.all_closed.wait()
        guarded.dispatcher.stalls = False
    else:
        assert (await asking).status_code == 200
    async with asyncio.timeout(60):
        while await code_of(generate(guarded, SINGLE)) is not grpc.StatusCode.OK:
            await asyncio.sleep(0.01)
    async with asyncio.timeout(60):
        while (await guarded.http.post(TEXT, json=body, headers=shown(SINGLE))).status_code != 200:
            await asyncio.sleep(0.01)


async def test_every_choice_counts_as_an_answer_at_once(guarded: Frontend) -> None:
    guarded.dispatcher.stalls = True
    wide = generate(guarded, FIRST, n=3)
    await guarded.dispatcher.stalled.wait()
    answer = await guarded.http.post(TEXT, json={"prompt": ["a", "b"]}, headers=shown(FIRST))
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    assert refusals(guarded, "concurrency") == 1
    answer = await guarded.http.post(TEXT, json={"prompt": "a", "n": 128}, headers=shown(FIRST))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "n")
    guarded.dispatcher.stalls = False
    assert (await guarded.http.post(TEXT, json={"prompt": "a"}, headers=shown(FIRST))).status_code == 200
    wide.cancel()
    await guarded.dispatcher.all_closed.wait()
    body = {"prompt": ["a", "b"], "n": 2}
    assert (await guarded.http.post(TEXT, json=body, headers=shown(FIRST))).status_code == 200


async def test_tokens_of_prompt_and_answer_count(guarded: Frontend) -> None:
    first = await guarded.http.post(TEXT, json={"prompt": "abcd", "max_tokens": 5}, headers=shown(THIRSTY))
    assert first.status_code == 200
    refused = await guarded.http.post(TEXT, json={"prompt": "a"}, headers=shown(THIRSTY))
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    assert int(refused.headers["retry-after"]) == 60 * (4 + 5 - 3) // 3
    trailing = await generate(guarded, THIRSTY).trailing_metadata()
    assert dict(trailing)["twostroke-error-kind"] == "RateLimitExceeded"


@pytest.mark.parametrize(
    ("key", "asked", "given"), [(ACME, 50, 0), (ACME, -3, -3), (FIRST, 50, 5), (FIRST, 4, 4), (FIRST, 10**9, 5)]
)
async def test_no_request_has_a_higher_class_than_its_key(
    guarded: Frontend, key: NewKey, asked: int, given: int
) -> None:
    body = {"prompt": "a", "priority": -asked}
    assert (await guarded.http.post(TEXT, json=body, headers=shown(key))).status_code == 200
    assert await code_of(generate(guarded, key, priority=asked)) is grpc.StatusCode.OK
    assert [each.routing.priority for each in guarded.dispatcher.parents] == [given, given]


async def test_the_tenant_is_the_keys_and_nobody_can_say_otherwise(guarded: Frontend) -> None:
    await guarded.http.post(TEXT, json={"prompt": "a", "cache_salt": "s", "user": "jo"}, headers=shown(ACME))
    async for _ in generate(guarded, OTHER, tenant="other"):
        pass
    parents = guarded.dispatcher.parents
    assert [each.routing.tenant for each in parents] == ["acme", "other"]
    assert [each.request.salt for each in parents] == [owner_salt("acme", b"s"), owner_salt("other", b"")]
    refused = await guarded.http.post(TEXT, json={"prompt": "a"}, headers={**shown(ACME), "x-tenant-id": "other"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "x-tenant-id")
    assert await code_of(generate(guarded, ACME, tenant="other")) is grpc.StatusCode.INVALID_ARGUMENT


async def test_only_the_same_tenant_goes_on_with_a_stream_or_aborts_it(guarded: Frontend) -> None:
    tokens = [message.resume_token async for message in generate(guarded, ACME, request_id="mine")]
    went_on = [message.text async for message in generate(guarded, ACME, resume_from=tokens[2])]
    assert "".join(went_on) == "lo"
    assert await code_of(generate(guarded, OTHER, resume_from=tokens[2])) is grpc.StatusCode.INVALID_ARGUMENT
    stolen = {**shown(OTHER), "last-event-id": tokens[2]}
    assert (await guarded.http.post(TEXT, json={"prompt": "a", "stream": True}, headers=stolen)).status_code == 400
    bare = tokens[2].replace("." + tokens[2].partition(".")[2].partition(":")[0], "")
    assert await code_of(generate(guarded, ACME, resume_from=bare)) is grpc.StatusCode.INVALID_ARGUMENT

    guarded.dispatcher.stalls = True
    stub, open_one = InferenceStub(guarded.channel), generate(guarded, ACME, request_id="same")
    await guarded.dispatcher.stalled.wait()
    for key, found in ((OTHER, False), (ACME, True)):
        request = inference_pb2.AbortRequest(request_id="same")
        assert (await stub.Abort(request, metadata=tuple(shown(key).items()))).found is found
    assert await code_of(open_one) is grpc.StatusCode.CANCELLED


async def test_the_file_is_read_again_and_a_broken_one_changes_nothing(guarded: Frontend, file: Path) -> None:
    async def status(key: NewKey) -> int:
        return (await guarded.http.get("/v1/models", headers=shown(key))).status_code

    def value(name: str) -> float | None:
        return guarded.metrics.registry.get_sample_value(f"twostroke_api_keys{name}", {"role": "router"})

    async def until(name: str, wanted: float) -> None:
        async with asyncio.timeout(60):
            while value(name) != wanted:
                await asyncio.sleep(0.01)

    assert (await status(ACME), await status(OTHER)) == (200, 200)
    write(file, OTHER)
    await until("", 1)
    assert (await status(ACME), await status(OTHER)) == (401, 200)
    await asyncio.to_thread(file.write_text, "keys: [")
    await until("_stale", 1)
    assert (await status(ACME), await status(OTHER)) == (401, 200)
    write(file, ACME)
    await until("_stale", 0)
    assert (await status(ACME), await status(OTHER)) == (200, 401)
    await asyncio.to_thread(file.unlink)
    await until("_stale", 1)
    assert await status(ACME) == 200


def test_a_key_expires_when_it_is_said_to() -> None:
    key, expires = draw_key(), datetime.now(UTC) + timedelta(hours=1)
    keys = {key.id: KeyEntry(tenant="t", sha256=key.sha256, expires=expires.isoformat())}
    header, at_s = shown(key)["authorization"], expires.timestamp()
    assert find_key(keys, header, at_s - 1)[0] == key.id
    with pytest.raises(InvalidApiKey, match="expired"):
        find_key(keys, header, at_s)
    assert key.key not in repr(keys)
    assert (
        dataclasses.replace(keys[key.id], expires="2027-01-31").expires_s()
        == datetime(2027, 1, 31, tzinfo=UTC).timestamp()
    )


HASH = "0" * 64


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("keys: [", "line 1: "),
        (
            f"keys:\n  a: {{tenant: t, sha256: '{HASH}'}}\n  a: {{tenant: u, sha256: '{HASH}'}}",
            "line 3: 'a' is there twice",
        ),
        (f"keys: {{a: {{tenant: t, sha256: '{HASH}', rate: 3}}}}", r"unknown keys \['rate'\]"),
        ("keys: {a: {tenant: t}}", r"needs \['sha256'\]"),
        ("keys: {a: {tenant: t, sha256: plain}}", "sha256 must be 64 hexadecimal digits"),
        (f"keys: {{a: {{tenant: '', sha256: '{HASH}'}}}}", "tenant must be printable"),
        (f"keys: {{a: {{tenant: t, sha256: '{HASH}', concurrency: 0}}}}", "concurrency must be positive"),
        (f"keys: {{a: {{tenant: t, sha256: '{HASH}', expires: soon}}}}", "expires must be a date"),
        ("[]", "must be an object"),
        ("", "is empty"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_with_its_name_and_what_is_wrong(
    tmp_path: Path, text: str, why: str
) -> None:
    with pytest.raises(ConfigError, match=why):
        parse_keys(text, "keys.yaml")
    path = tmp_path / "keys.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=f"--api-keys {path}"):
        KeyAuthenticator(str(path), "token", RouterMetrics())


def test_a_date_that_yaml_would_take_for_one_is_a_date_here_too() -> None:
    file = parse_keys(f"keys: {{a: {{tenant: t, sha256: '{HASH}', expires: 2027-01-31}}}}", "keys.yaml")
    assert file.keys["a"].expires == "2027-01-31"
    assert parse_keys("keys: {}", "keys.yaml").keys == {}


async def test_kserves_health_needs_no_key_and_everything_else_does(guarded: Frontend) -> None:
    for path in ("/v2/health/live", "/v2/health/ready"):
        assert (await guarded.http.get(path)).status_code == 200
    for path in ("/v2", "/v2/models/toy", "/v2/models/toy/ready"):
        refused = await guarded.http.get(path)
        assert refused.status_code == 401
        assert isinstance(refused.json()["error"], str)
    for method in kserve_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods:
        path = f"/{method.containing_service.full_name}/{method.name}"
        calls = guarded.channel.unary_stream if method.server_streaming else guarded.channel.unary_unary
        is_open = method.name in ("ServerLive", "ServerReady")
        assert await code_of(calls(path)(b"")) is grpc.StatusCode["OK" if is_open else "UNAUTHENTICATED"], method.name


def infer(request_id: str) -> kserve_pb2.ModelInferRequest:
    request = kserve_pb2.ModelInferRequest(model_name="toy", id=request_id)
    request.inputs.add(name="text_input", datatype="BYTES", shape=[1]).contents.bytes_contents.append(b"a")
    return request


async def test_each_request_of_a_kserve_stream_is_counted_for_its_key_and_the_stream_is_not(guarded: Frontend) -> None:
    stub = GRPCInferenceServiceStub(guarded.channel)
    for key, served in ((SINGLE, 3), (SLOW, 2)):
        call = stub.ModelStreamInfer(metadata=tuple(shown(key).items()))
        for rank in range(3):
            await call.write(infer(str(rank)))
            response = await call.read()
            assert response.infer_response.id == str(rank)
            assert ("requests per minute" in response.error_message) == (rank >= served)
        call.cancel()
    guarded.dispatcher.stalls = True
    call = stub.ModelStreamInfer(metadata=tuple(shown(SINGLE).items()))
    await call.write(infer("stays"))
    await guarded.dispatcher.stalled.wait()
    await call.write(infer("too many"))
    response = await call.read()
    assert (response.infer_response.id, "at once" in response.error_message) == ("too many", True)
    assert response.infer_response.parameters["retryable"].bool_param


async def test_a_key_that_is_revoked_ends_no_kserve_stream_but_serves_no_more_requests(
    guarded: Frontend, file: Path
) -> None:
    call = GRPCInferenceServiceStub(guarded.channel).ModelStreamInfer(metadata=tuple(shown(ACME).items()))
    await call.write(infer("first"))
    assert (await call.read()).error_message == ""
    write(file, OTHER)
    async with asyncio.timeout(60):
        while not refusals(guarded, "wrong"):
            await call.write(infer("later"))
            response = await call.read()
    assert response.error_message == "incorrect API key"
