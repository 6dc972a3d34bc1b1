"""`twostroke trace REQUEST`: shows where the time of one request went, as its routers and workers remember it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

import grpc

from cluster.clients import admin_access
from cluster.clients.admin_access import AdminAccess, describe
from cluster.terminal.shown import values_of
from twostroke.base.errors import NotFound, PeerLost
from twostroke.rpc.traces import attributes_of
from twostroke.rpc.v1 import control_pb2, control_pb2_grpc
from twostroke.rpc.waterfall import ROOT, WaterfallLine, lines_of, missing_of
from twostroke.tracing.recorder import MOST_REQUESTS

ANSWER_S = 10.0
"""Seconds for a router, which asks its workers and waits for those that do not answer."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "request",
        metavar="REQUEST",
        help="its id: as its answer shows it (chatcmpl-..., cmpl-...), x-request-id over HTTP, request_id over gRPC, "
        "or as logs show it",
    )
    admin_access.add_arguments(parser)
    parser.add_argument("--json", action="store_true", help="every span with all that is known of it, as JSON")


def run(args: argparse.Namespace) -> int:
    known = _ask(admin_access.access_from(args), args.request)
    if args.json:
        spans = [_as_values(span) for span in known.spans]
        print(json.dumps({"stream": known.stream, "spans": spans, "silent": list(known.silent)}))
    else:
        _print(args.request, known)
    return 0


def _ask(access: AdminAccess, name: str) -> control_pb2.GetTraceResponse:
    """Returns what all routers and workers know of the latest stream of that name."""
    replies, failures = [], []
    for address in access.addresses:
        with access.channel(address) as channel:
            try:
                stub = control_pb2_grpc.ControlStub(channel)
                request = control_pb2.GetTraceRequest(name=name)
                replies.append(stub.GetTrace(request, timeout=ANSWER_S))
            except grpc.RpcError as error:
                failures.append(f"{address}: {describe(error)}")
    if not replies:
        raise PeerLost("; ".join(failures))
    found = [one for one in replies if one.stream]
    if not found:
        raise NotFound(_why_not(name, is_forgotten=any(one.forgotten for one in replies)))
    return merged(found)


def merged(found: Sequence[control_pb2.GetTraceResponse]) -> control_pb2.GetTraceResponse:
    """Merges the spans of one stream from several routers. If two clients used one id, the latest stream counts."""
    latest = max(found, key=lambda one: max((span.start_s for span in one.spans), default=0.0))
    spans = {span.span_id: span for one in found if one.stream == latest.stream for span in one.spans}
    silent = sorted({worker for one in found for worker in one.silent})
    return control_pb2.GetTraceResponse(stream=latest.stream, spans=spans.values(), silent=silent)


def _why_not(name: str, *, is_forgotten: bool) -> str:
    if is_forgotten:
        return (
            f"request {name!r} is too long ago: routers and workers keep the latest {MOST_REQUESTS} each "
            "(`serve --otlp-endpoint` sends all of them to a collector)"
        )
    return (
        f"no router or worker knows a request {name!r}; its id is the `id` of its answer, and in the header "
        "x-request-id of its response"
    )


def _print(name: str, known: control_pb2.GetTraceResponse) -> None:
    trace = known.spans[0].trace_id if known.spans else "unknown"
    print(f"request {name}, stream {known.stream}, trace {trace}")
    for line in lines_of(known.spans):
        print(_row(line))
    if not any(span.name == ROOT for span in known.spans):
        print("its end is missing: it is still open, or its router is gone")
    for worker in missing_of(known.spans):
        print(f"the part of {worker} is missing: it still runs, or that epoch of it is over")
    if known.silent:
        print(f"did not answer: {', '.join(known.silent)}")


def _row(line: WaterfallLine) -> str:
    length = "" if line.length_ms is None else f"{line.length_ms:10.1f}"
    name = f"{'  ' * line.depth}{'· ' * (line.length_ms is None)}{line.name}"
    return f"{name:<22} {line.process:<16} {line.start_ms:10.1f} {length:>10} ms |{line.bar:<32}| {line.facts}"


def _as_values(span: control_pb2.TraceSpan) -> dict[str, object]:
    return {
        **values_of(span),
        "span_id": f"{span.span_id:016x}",
        "parent_id": f"{span.parent_id:016x}" if span.parent_id else None,
        "attributes": attributes_of(span.attributes),
        "events": [{**values_of(event), "attributes": attributes_of(event.attributes)} for event in span.events],
    }
