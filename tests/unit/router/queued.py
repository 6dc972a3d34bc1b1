"""Requests in an admission queue, of so many tokens and so many that may follow."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from router.admission.queued_request import QueuedRequest
from router.routing.selector import RoutingParams
from twostroke.base.ids import BlockHash, RequestId
from twostroke.request import Attempt, GenerateRequest, SamplingParams

_ROUTING = frozenset(each.name for each in dataclasses.fields(RoutingParams))
_WANTED = frozenset(each.name for each in dataclasses.fields(GenerateRequest))


def an_attempt(name: str, tokens: int, hashes: Sequence[BlockHash] = (), most_new: int = 100, **wanted: Any) -> Attempt:
    sampling = SamplingParams(seed=0, max_tokens=most_new)
    request = GenerateRequest(**{"prompt": (0,) * tokens, "sampling": sampling, **wanted})
    return Attempt(
        request=request, request_id=RequestId(name), number=0, block_hashes=tuple(hashes), router_id="router-0"
    )


def queued_request(
    name: str, tokens: int, hashes: Sequence[BlockHash] = (), most_new: int = 100, **fields: Any
) -> QueuedRequest:
    """`fields`: those of the queued request, and of what it refers to."""
    routing = {key: value for key, value in fields.items() if key in _ROUTING}
    wanted = {key: value for key, value in fields.items() if key in _WANTED and key != "deadline_s"}
    rest = {key: value for key, value in fields.items() if key not in {*routing, *wanted}}
    attempt = an_attempt(name, tokens, hashes, most_new, **wanted)
    return QueuedRequest(attempt=attempt, routing=RoutingParams(**routing), **{"arrived_s": 0.0, **rest})
