"""A request survives its way to a worker: every field of it, or it is named as one that stays with the router."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from twostroke.base.ids import BlockHash, RequestId
from twostroke.request import Attempt, CacheHint, GenerateRequest, Grammar, SampledToken, SamplingParams, WeightsRef
from twostroke.rpc.convert import (
    attempt_from_message,
    attempt_to_message,
    request_from_message,
    request_to_message,
    sampling_from_message,
    sampling_to_message,
)
from twostroke.rpc.v1.worker_pb2 import OpenRequest, Request, Sampling
from twostroke.tracing.span import TraceContext

SAMPLING = SamplingParams(
    seed=2**63 + 1,
    max_tokens=7,
    choice=2,
    temperature=0.5,
    top_k=4,
    top_p=0.9,
    min_p=0.1,
    presence_penalty=0.3,
    frequency_penalty=-0.2,
    repetition_penalty=1.1,
    logit_bias=((3, 1.5), (1, -2.0)),
    logprobs=2,
    logprob_token_ids=(4, 5),
    prompt_logprobs=0,
    min_tokens=1,
    ignore_eos=True,
    stop_token_ids=(6,),
    allowed_tokens=b"\x01\x00\x00\x00",
    grammar=Grammar("%llguidance {}\nstart: /a/"),
)
REQUEST = GenerateRequest(
    prompt=(1, 2, 3),
    sampling=SAMPLING,
    salt=b"salt",
    public_blocks=1,
    weights=WeightsRef(bytes(16), "/adapter"),
    deadline_s=12.5,
    speculation="off",
    hints=(CacheHint(1, 2.5),),
    hint_tenant="hinting",
)
ATTEMPT = Attempt(
    request=REQUEST,
    request_id=RequestId("r#2"),
    number=3,
    emitted=(SampledToken(4, -0.5, ((4, -0.5),)), SampledToken(5)),
    block_hashes=(BlockHash(bytes(range(16))),),
    router_id="router-1",
    trace=TraceContext(1, 2, True),
)


def sampled(params: SamplingParams) -> SamplingParams:
    return sampling_from_message(Sampling.FromString(sampling_to_message(params).SerializeToString()))


def wanted(request: GenerateRequest) -> GenerateRequest:
    return request_from_message(Request.FromString(request_to_message(request).SerializeToString()))


def opened(attempt: Attempt) -> Attempt:
    message = attempt_to_message(attempt, fingerprint="f", worker_epoch="1.1", source=None)
    return attempt_from_message(OpenRequest.FromString(message.SerializeToString()))


def _defaults(of: type) -> dict[str, Any]:
    return {each.name: each.default for each in dataclasses.fields(of) if each.default is not dataclasses.MISSING}


@pytest.mark.parametrize(("value", "sent"), [(SAMPLING, sampled), (REQUEST, wanted), (ATTEMPT, opened)])
def test_every_field_arrives(value: Any, sent: Callable[[Any], Any]) -> None:
    got, defaults = sent(value), _defaults(type(value))
    for name in (each.name for each in dataclasses.fields(value)):
        mine = getattr(value, name)
        assert name not in defaults or mine != defaults[name], f"{name}: the example shows nothing of it"
        assert getattr(got, name) == mine, name


def test_what_was_left_out_stays_left_out() -> None:
    least = SamplingParams(seed=0, max_tokens=1)
    request = GenerateRequest(prompt=(1,), sampling=least)
    attempt = Attempt(request=request, request_id=RequestId("r#0"), number=0, block_hashes=(), router_id="router-1")
    assert opened(attempt) == attempt
