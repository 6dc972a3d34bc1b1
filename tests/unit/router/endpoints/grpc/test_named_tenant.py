"""The tenant of a message is the one that parsing it gives."""

from __future__ import annotations

import random

import pytest
from google.protobuf.message import DecodeError

from router.endpoints.grpc.named_tenant import MOST_FIELDS, named_tenant
from router.requests.work import PreparationOutcome, Work
from tests.inline_preparer import InlinePreparer
from tests.unit.router.conftest import Frontend
from twostroke.rpc.v1 import inference_pb2, inference_pb2_grpc


@pytest.mark.parametrize("seed", range(3))
def test_a_message_names_the_tenant_that_parsing_it_gives(seed: int) -> None:
    draw, known = random.Random(seed), 0
    for _ in range(2_000):
        message = inference_pb2.GenerateRequest(text="x" * draw.choice([0, 5, 300]), priority=draw.choice([0, -1, 5]))
        message.tenant = draw.choice(["", "acme", "naïve"])
        raw = bytearray(message.SerializeToString())
        raw += draw.choice([b"", inference_pb2.GenerateRequest(tenant="late").SerializeToString()])
        if draw.random() < 0.3 and raw:
            raw[draw.randrange(len(raw))] = draw.randrange(256)
        named = named_tenant(bytes(raw))
        try:
            parsed = inference_pb2.GenerateRequest.FromString(bytes(raw))
        except DecodeError:
            continue
        assert named in (None, parsed.tenant)
        known += named is not None
    assert known > 1_500


def test_a_message_of_very_many_fields_is_not_read_to_its_end() -> None:
    assert named_tenant(b"\x12\x00" * MOST_FIELDS) is None


async def test_text_of_a_message_is_kept_for_its_tenant(frontend: Frontend, monkeypatch: pytest.MonkeyPatch) -> None:
    tenants: list[str | None] = []
    prepare = InlinePreparer.prepare

    async def noted(self: InlinePreparer, work: Work, tenant: str) -> PreparationOutcome:
        tenants.append(work.tenant)
        return await prepare(self, work, tenant)

    monkeypatch.setattr(InlinePreparer, "prepare", noted)
    stub = inference_pb2_grpc.InferenceStub(frontend.channel)
    async for _ in stub.Generate(inference_pb2.GenerateRequest(text="a", tenant="acme")):
        pass
    assert tenants == ["acme"]
