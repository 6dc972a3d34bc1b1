"""Pins as JSON: the console's forms to add and remove one, and its list."""

from __future__ import annotations

import math
from typing import Any

from twostroke.base.errors import InvalidRequest
from twostroke.rpc.v1 import pins_pb2

ADD_FIELDS: dict[str, type] = {
    "text": str,
    "system": str,
    "owner": str,
    "tenant": str,
    "cache_salt": str,
    "model": str,
    "ttl_s": float,
    "role": str,
}
REMOVE_FIELDS: dict[str, type] = {"pin": str}
MOST_LISTED = 500

_STATES = {
    pins_pb2.PIN_STATE_READY: "ready",
    pins_pb2.PIN_STATE_COMPUTING: "computing",
    pins_pb2.PIN_STATE_FAILED: "failed",
    pins_pb2.PIN_STATE_AWAY: "away",
}


def add_request(fields: dict[str, Any]) -> pins_pb2.AddPinRequest:
    """Returns the request for a form's fields. Raises InvalidRequest unless they name one prefix."""
    if bool(fields["text"]) == bool(fields["system"]):
        raise InvalidRequest("name either a text or a system message", field="text")
    request = pins_pb2.AddPinRequest(
        owner=fields["owner"], tenant=fields["tenant"], cache_salt=fields["cache_salt"], model=fields["model"]
    )
    if fields["system"]:
        request.chat.messages.add(role="system", content=fields["system"])
    else:
        request.text = fields["text"]
    if fields["ttl_s"]:
        request.ttl_s = fields["ttl_s"]
    request.workers.append(fields["role"] or "all")
    return request


def remove_request(fields: dict[str, Any]) -> pins_pb2.RemovePinRequest:
    if not fields["pin"]:
        raise InvalidRequest("a pin must be named", field="pin")
    return pins_pb2.RemovePinRequest(pin_id=fields["pin"])


def listed(response: pins_pb2.ListPinsResponse) -> dict[str, Any]:
    """Returns the pins, each with the workers that hold it."""
    pins: dict[str, dict[str, Any]] = {}
    for held in response.held:
        if held.pin_id not in pins and len(pins) == MOST_LISTED:
            continue
        pin = pins.setdefault(
            held.pin_id,
            {
                "pin": held.pin_id,
                "owner": held.owner,
                "tenant": held.tenant,
                "text": held.text,
                "expires_s": held.expires_s if held.HasField("expires_s") else None,
                "held": [],
            },
        )
        pin["held"].append(
            {
                "worker": held.worker_id,
                "state": _STATES.get(held.state, "unknown"),
                "blocks": held.blocks,
                "ready_blocks": held.ready_blocks,
                "bytes": held.bytes,
                "hits": held.hits,
                "saved_s": held.saved_s if math.isfinite(held.saved_s) else None,
                "problem": held.problem,
            }
        )
    uses = [
        {"worker": use.worker_id, "pinned": use.pages_pinned, "most": use.most_pages, "total": use.pages_total}
        for use in response.uses
    ]
    return {"pins": list(pins.values()), "workers": uses}
