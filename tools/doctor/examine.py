"""Sends the chat twice, watches the index in between, and collects what was seen."""

from __future__ import annotations

import contextlib
import http.client
import secrets
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
from prometheus_client.parser import text_string_to_metric_families

from cluster.clients.admin_access import AdminAccess, describe, router_info
from router.routing.policies import CACHE_BLIND
from tools.doctor.branches import READERS
from tools.doctor.endpoints import ANSWER_TOKENS, ChatEndpoint
from tools.doctor.facts import Facts, Samples, SentChat, WorkerFacts
from twostroke.base.errors import PeerLost
from twostroke.base.ids import BlockHash
from twostroke.kv_cache.block import block_hashes_of, owner_salt
from twostroke.kv_cache.parts import GroupKind
from twostroke.rpc.convert import form_of, hashes_from_bytes
from twostroke.rpc.v1 import control_pb2, control_pb2_grpc

ANSWER_S = 5.0
QUIET_S = 3.0
"""Seconds for events of the first chat to reach the index: several heartbeats."""
BLOCKS = 6
"""Least blocks of the chat, if the model takes as many."""
WORDS = tuple("the quick brown fox jumps over the lazy dog and runs on through the long grass".split())  # noqa: SIM905


def examine(channel: grpc.Channel, admin: AdminAccess, endpoint: ChatEndpoint, salts: tuple[str, str]) -> Facts:
    """Examines a server over a `channel` to the first of `admin`'s addresses. Raises PeerLost.

    Its routers share a port, so any of them may serve a chat.
    """
    control = control_pb2_grpc.ControlStub(channel)
    server = _server_info(channel, admin)
    model: control_pb2.ModelInfo = _answer(control.GetModelInfo, control_pb2.GetModelInfoRequest(), admin)
    text = _chat_of(endpoint, BLOCKS * model.block_size, model.max_model_len - ANSWER_TOKENS)
    first = SentChat(salt=salts[0], tokens=endpoint.tokenize(text))
    names = block_hashes_of(first.tokens, model.block_size, owner_salt("", salts[0].encode()))
    routers = [seen_from(admin.addresses[0], server.metrics_address), *_metrics_of_others(admin)]
    before = [scrape(router) for router in routers]
    with IndexWatch(channel, names) as watch:
        first = endpoint.send(text, first)
        watch.until_held(len(names), QUIET_S if first.failure is None else 0.0)
        workers = tuple(_workers(control, admin, scrape(routers[0]), watch))
        second = SentChat(salt=salts[1], tokens=endpoint.tokenize(text))
        if first.failure is None:
            second = endpoint.send(text, second)
    policies = (_policy(earlier, scrape(router)) for router, earlier in zip(routers, before, strict=True))
    policy = next((each for each in policies if each is not None), None)
    return Facts(
        block_size=model.block_size,
        vocab_size=model.vocab_size,
        fingerprint=server.fingerprint,
        kv_form=form_of(model),
        policy=policy,
        is_blind=policy in CACHE_BLIND,
        workers=workers,
        first=first,
        second=second,
    )


def grpc_address_of(channel: grpc.Channel, admin: AdminAccess) -> str:
    """Returns the address that the router's clients use. Raises PeerLost."""
    return seen_from(admin.addresses[0], _server_info(channel, admin).grpc_address)


def _server_info(channel: grpc.Channel, admin: AdminAccess) -> control_pb2.ServerInfo:
    control = control_pb2_grpc.ControlStub(channel)
    info: control_pb2.ServerInfo = _answer(control.GetServerInfo, control_pb2.GetServerInfoRequest(), admin)
    return info


def _metrics_of_others(admin: AdminAccess) -> Iterator[str]:
    """Yields where the metrics of the routers after the first are, as far as they answer."""
    for address in admin.addresses[1:]:
        with contextlib.suppress(grpc.RpcError):
            yield seen_from(address, router_info(address, admin).metrics_address)


def _answer(call: Callable[..., Any], request: object, admin: AdminAccess) -> Any:
    """Raises PeerLost."""
    try:
        return call(request, timeout=ANSWER_S)
    except grpc.RpcError as error:
        raise PeerLost(f"{admin.addresses[0]}: {describe(error)}") from error


def _chat_of(endpoint: ChatEndpoint, tokens: int, most_tokens: int) -> str:
    """Returns a text that was not sent before, of at least `tokens` tokens if that many may be."""
    mark = f"Canary {secrets.token_hex(8)}:"
    count = tokens
    while count > 1:
        text = " ".join((mark, *(WORDS[index % len(WORDS)] for index in range(count))))
        if len(endpoint.tokenize(text)) <= most_tokens:
            return text
        count //= 2
    return mark


def _workers(
    control: control_pb2_grpc.ControlStub, admin: AdminAccess, router: Samples, watch: IndexWatch
) -> list[WorkerFacts]:
    loads: control_pb2.GetLoadResponse = _answer(control.GetLoad, control_pb2.GetLoadRequest(), admin)
    return [_worker(entry, admin.addresses[0], router, watch) for entry in loads.workers]


def _worker(entry: control_pb2.WorkerLoad, address: str, router: Samples, watch: IndexWatch) -> WorkerFacts:
    worker, load = entry.worker_id, entry.load
    where = entry.server.metrics_address
    page: Samples = scrape(seen_from(address, where)) if where else {}
    own = value(page, "twostroke_event_sequence")
    if own is not None:
        # What it published until now was under way to the index at most; what comes later is no matter here.
        watch.until_sequence(worker, int(own), QUIET_S)
    state = load.state or control_pb2.WORKER_STATE_STARTING
    return WorkerFacts(
        worker=worker,
        role=entry.server.role,
        state=control_pb2.WorkerState.Name(state).removeprefix("WORKER_STATE_").lower(),
        fingerprint=entry.server.fingerprint,
        kv_form=entry.server.kv_form,
        event_age_s=value(router, "twostroke_worker_event_age_seconds", worker=worker),
        own_sequence=None if own is None else int(own),
        index_sequence=watch.sequence(worker),
        held_blocks=watch.held(worker),
        stored_blocks=watch.stored(worker),
        queued_tokens=load.queued_tokens,
        further={name: read(page, entry.server.role) for name, read in READERS.items()},
    )


def _policy(before: Samples, after: Samples) -> str | None:
    """Returns the policy that made decisions meanwhile."""
    name = "twostroke_decisions_total"
    for labels, count in after.get(name, ()):
        if count > (value(before, name, **labels) or 0.0):
            return labels.get("policy")
    return None


SCRAPE_S = 3.0
HERE = ("127.0.0.1", "localhost", "0.0.0.0", "::1", "[::1]", "::", "[::]")


def scrape(address: str) -> Samples:
    """Returns the samples of a metrics page. Empty where no server answers, or where another program answers."""
    try:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=SCRAPE_S) as answer:
            families = list(text_string_to_metric_families(answer.read().decode()))
    except (OSError, http.client.HTTPException, ValueError):
        return {}
    samples: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in families:
        for sample in family.samples:
            samples.setdefault(sample.name, []).append((sample.labels, sample.value))
    return samples


def value(samples: Samples, name: str, **labels: str) -> float | None:
    return next((found for its, found in samples.get(name, ()) if labels.items() <= its.items()), None)


def seen_from(server: str, address: str) -> str:
    """Returns an `address` that a process beside `server` gave of itself: what it calls "here" is there."""
    host, _, port = address.rpartition(":")
    return f"{server.rpartition(':')[0]}:{port}" if host in HERE else address


@dataclass(slots=True)
class Seen:
    """What the index says about one worker."""

    sequence: int = 0
    holds: dict[int, set[BlockHash]] = field(default_factory=dict)
    """The chat's blocks that the worker holds, by tier."""
    has_held: set[BlockHash] = field(default_factory=set)


class IndexWatch:
    """A thread of its own from `with` to the end of it."""

    def __init__(self, channel: grpc.Channel, names: Sequence[BlockHash]) -> None:
        self._call: Iterator[control_pb2.KvEventBatch] = control_pb2_grpc.ControlStub(channel).SubscribeKvEvents(
            control_pb2.SubscribeKvEventsRequest()
        )
        self._names = tuple(names)
        self._wanted = frozenset(names)
        self._seen: dict[str, Seen] = {}
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._follow, name="index watch", daemon=True)

    def __enter__(self) -> IndexWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        assert isinstance(self._call, grpc.RpcContext)
        self._call.cancel()
        self._thread.join()

    def until_held(self, blocks: int, timeout_s: float) -> None:
        """Waits until some worker holds that many leading blocks, or the time is over."""
        self._until(lambda: any(self.held(worker) >= blocks for worker in self._seen), timeout_s)

    def until_sequence(self, worker: str, sequence: int, timeout_s: float) -> None:
        self._until(lambda: (self.sequence(worker) or 0) >= sequence, timeout_s)

    def sequence(self, worker: str) -> int | None:
        with self._changed:
            return self._seen[worker].sequence if worker in self._seen else None

    def held(self, worker: str) -> int:
        """Returns leading blocks, on any tier."""
        with self._changed:
            here = set().union(*self._seen[worker].holds.values()) if worker in self._seen else set()
        return next((depth for depth, name in enumerate(self._names) if name not in here), len(self._names))

    def stored(self, worker: str) -> int:
        """Blocks held at any time."""
        with self._changed:
            return len(self._seen[worker].has_held) if worker in self._seen else 0

    def _until(self, is_so: Callable[[], bool], timeout_s: float) -> None:
        give_up_s = time.monotonic() + timeout_s
        with self._changed:
            while not is_so() and (left_s := give_up_s - time.monotonic()) > 0:
                self._changed.wait(left_s)

    def _follow(self) -> None:
        try:
            for batch in self._call:
                with self._changed:
                    self._take(batch)
                    self._changed.notify_all()
        except grpc.RpcError:
            return  # cancelled, or the router is gone: then the calls that matter fail, too

    def _take(self, batch: control_pb2.KvEventBatch) -> None:
        seen = self._seen.setdefault(batch.worker_id, Seen())
        seen.sequence = batch.sequence
        if batch.snapshot or batch.cleared:
            seen.holds.clear()
        self._change(seen, control_pb2.TIER_DEVICE, batch.stored, batch.removed)
        for change in batch.further:
            if change.group != GroupKind.FULL:
                continue  # the pages of a block say that it is here
            self._change(seen, change.tier, change.stored, change.removed)

    def _change(self, seen: Seen, tier: int, stored: bytes, removed: bytes) -> None:
        holds = seen.holds.setdefault(tier, set())
        holds -= self._wanted.intersection(hashes_from_bytes(removed))
        holds |= self._wanted.intersection(hashes_from_bytes(stored))
        seen.has_held |= holds
