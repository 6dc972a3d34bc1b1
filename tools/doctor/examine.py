"""Sends the chat twice, watches the index in between, and collects what was seen."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import grpc

from cluster.clients.admin_access import AdminAccess, describe
from router.routing.policies import CACHE_BLIND
from tools.doctor.endpoints import ANSWER_TOKENS, Endpoint
from tools.doctor.facts import Canary, Facts, WorkerFacts
from tools.doctor.scrape import Samples, scrape, seen_from, value
from tools.doctor.watch import IndexWatch
from twostroke.errors import PeerLost
from twostroke.kv_cache.block import block_hashes_of, owner_salt
from twostroke.rpc.v1 import control_pb2, control_pb2_grpc

ANSWER_S = 5.0
QUIET_S = 3.0
"""For events of the first chat to reach the index: several heartbeats."""
BLOCKS = 6
"""Blocks of the chat, at least, where the model takes as many."""
WORDS = tuple("the quick brown fox jumps over the lazy dog and runs on through the long grass".split())  # noqa: SIM905


def examine(channel: grpc.Channel, admin: AdminAccess, endpoint: Endpoint, salts: tuple[str, str]) -> Facts:
    """`channel` is to the first of `admin`'s addresses. Raises PeerLost where the server cannot be asked."""
    control, address = control_pb2_grpc.ControlStub(channel), admin.addresses[0]
    server = _server_info(channel, admin)
    try:
        model = control.GetModelInfo(control_pb2.GetModelInfoRequest(), timeout=ANSWER_S, metadata=admin.metadata)
    except grpc.RpcError as error:
        raise PeerLost(f"{address}: {describe(error)}") from error
    text = _chat_of(endpoint, BLOCKS * model.block_size, model.max_model_len - ANSWER_TOKENS)
    first = Canary(salt=salts[0], tokens=endpoint.tokenize(text))
    names = block_hashes_of(first.tokens, model.block_size, owner_salt("", salts[0].encode()))
    router = seen_from(address, server.metrics_address)
    before = scrape(router)
    with IndexWatch(channel, admin.metadata, names) as watch:
        first = endpoint.send(text, first)
        watch.until_held(len(names), QUIET_S if first.failure is None else 0.0)
        workers = tuple(_workers(control, admin, scrape(router), watch))
        second = Canary(salt=salts[1], tokens=endpoint.tokenize(text))
        if first.failure is None:
            second = endpoint.send(text, second)
    policy = _policy(before, scrape(router))
    return Facts(
        block_size=model.block_size,
        vocab_size=model.vocab_size,
        fingerprint=server.fingerprint,
        policy=policy,
        is_blind=policy in CACHE_BLIND,
        workers=workers,
        first=first,
        second=second,
    )


def grpc_address_of(channel: grpc.Channel, admin: AdminAccess) -> str:
    """Return the address that the router's clients use. Raises PeerLost."""
    return seen_from(admin.addresses[0], _server_info(channel, admin).grpc_address)


def _server_info(channel: grpc.Channel, admin: AdminAccess) -> control_pb2.ServerInfo:
    try:
        return control_pb2_grpc.ControlStub(channel).GetServerInfo(
            control_pb2.GetServerInfoRequest(), timeout=ANSWER_S, metadata=admin.metadata
        )
    except grpc.RpcError as error:
        raise PeerLost(f"{admin.addresses[0]}: {describe(error)}") from error


def _chat_of(endpoint: Endpoint, tokens: int, most_tokens: int) -> str:
    """A text that nobody has sent before, of at least `tokens` tokens if that many may be."""
    mark = f"Canary {secrets.token_hex(8)}:"
    count = tokens
    while count > 1:
        text = " ".join((mark, *(WORDS[at % len(WORDS)] for at in range(count))))
        if len(endpoint.tokenize(text)) <= most_tokens:
            return text
        count //= 2
    return mark


def _workers(
    control: control_pb2_grpc.ControlStub, admin: AdminAccess, router: Samples, watch: IndexWatch
) -> list[WorkerFacts]:
    address = admin.addresses[0]
    try:
        loads: Sequence[control_pb2.WorkerLoad] = control.GetLoad(
            control_pb2.GetLoadRequest(), timeout=ANSWER_S, metadata=admin.metadata
        ).workers
    except grpc.RpcError as error:
        raise PeerLost(f"{address}: {describe(error)}") from error
    return [_worker(entry, address, router, watch) for entry in loads]


def _worker(entry: control_pb2.WorkerLoad, address: str, router: Samples, watch: IndexWatch) -> WorkerFacts:
    worker, load = entry.worker_id, entry.load
    own = None
    if entry.server.metrics_address:
        own = value(scrape(seen_from(address, entry.server.metrics_address)), "twostroke_event_sequence")
    if own is not None:
        # What it published until now was under way to the index at most; what comes later is no matter here.
        watch.until_sequence(worker, int(own), QUIET_S)
    state = load.state or control_pb2.WORKER_STATE_STARTING
    return WorkerFacts(
        worker=worker,
        role=entry.server.role,
        state=control_pb2.WorkerState.Name(state).removeprefix("WORKER_STATE_").lower(),
        fingerprint=entry.server.fingerprint,
        event_age_s=value(router, "twostroke_worker_event_age_seconds", worker=worker),
        own_sequence=None if own is None else int(own),
        index_sequence=watch.sequence(worker),
        held_blocks=watch.held(worker),
        stored_blocks=watch.stored(worker),
        queued_tokens=load.queued_tokens,
    )


def _policy(before: Samples, after: Samples) -> str | None:
    """Return the policy whose decisions were counted meanwhile."""
    name = "twostroke_decisions_total"
    for labels, count in after.get(name, ()):
        if count > (value(before, name, **labels) or 0.0):
            return labels.get("policy")
    return None
