"""The handshake opens a page connection: the reader names itself and the epoch it means, the owner admits or refuses.

    reader -> owner  [protocol, token, reader's worker id, its epoch, fingerprint, the owner's epoch it means]
    owner -> reader  ["welcome", worker id, epoch, fingerprint, pages of a region, bytes of one, ... of each region]
                 or ["refused", error class, message]

A frame that is none of these ends the connection without an answer.
"""

from __future__ import annotations

import hmac
import socket
import threading
from collections import Counter
from dataclasses import dataclass
from typing import Any, NoReturn

from twostroke.errors import FingerprintMismatch, InvalidRequest, PeerLost, ServeError, StaleEpoch, Unauthenticated
from twostroke.fault_points import Point, reach
from twostroke.ids import Epoch
from twostroke.kv_cache.layout import PoolLayout
from twostroke.transfer.base import Identity, PageEndpoint, layout_of, numbers_of
from twostroke.transfer.sockets.frames import Deadline, check_fields, receive_frame, send_frame

PROTOCOL = "twostroke-pages/2"
HANDSHAKE_LIMIT_BYTES = 16 << 10
"""Largest frame that is read from an unknown reader: token, ids and fingerprint are short."""
HANDSHAKE_S = 5.0
"""Time limit of the handshake of a new connection."""
_REFUSALS: dict[str, type[ServeError]] = {
    kind.__name__: kind for kind in (Unauthenticated, StaleEpoch, FingerprintMismatch)
}


@dataclass(frozen=True, slots=True)
class Welcome:
    """The owner's description of itself."""

    worker_id: str
    epoch: Epoch
    fingerprint: str
    layout: PoolLayout


class ReaderValidator:
    """Checks readers for the owner; called from connection threads."""

    def __init__(self, identity: Identity, layout: PoolLayout) -> None:
        self.refused: Counter[str] = Counter()
        """Refused connections by reason: an error class, or a word."""
        self._identity = identity
        self._layout = layout
        self._lock = threading.Lock()
        self._incarnations: dict[str, int] = {}

    def admit(self, sock: socket.socket, deadline: Deadline) -> str:
        """Admit a reader and return its worker id. Raises the refusal, or InvalidRequest for garbage."""
        fields = receive_frame(sock, HANDSHAKE_LIMIT_BYTES, deadline)
        check_fields(fields, (str,) * 6)
        try:
            self._check(fields)
        except (Unauthenticated, StaleEpoch, FingerprintMismatch) as refusal:
            send_frame(sock, ["refused", type(refusal).__name__, refusal.message], deadline)
            raise
        reach(Point.TRANSPORT_GREETED)
        me = self._identity
        welcome = ["welcome", me.worker_id, str(me.epoch), me.fingerprint, *numbers_of(self._layout)]
        send_frame(sock, welcome, deadline)
        return str(fields[2])

    def refuse(self, reason: str) -> None:
        """Count a refused connection."""
        with self._lock:
            self.refused[reason] += 1

    def _check(self, fields: list[str]) -> None:
        protocol, token, worker_id, epoch, fingerprint, meant = fields
        me = self._identity
        if not hmac.compare_digest(token.encode(), me.token.encode()):
            raise Unauthenticated("the cluster token of the reader is wrong")
        if protocol != PROTOCOL:
            raise FingerprintMismatch(f"{me.worker_id} speaks {PROTOCOL!r}, the reader {protocol[:64]!r}")
        self._refuse_earlier_epoch(worker_id, _epoch(epoch))
        if _epoch(meant) != me.epoch:
            raise StaleEpoch(f"the reader means epoch {meant} of {me.worker_id}, this is epoch {me.epoch}")
        if fingerprint != me.fingerprint:
            raise FingerprintMismatch(mismatch(me.worker_id, me.fingerprint, worker_id, fingerprint))

    def _refuse_earlier_epoch(self, worker_id: str, epoch: Epoch) -> None:
        with self._lock:
            newest = self._incarnations.setdefault(worker_id, epoch.incarnation)
            if epoch.incarnation < newest:
                raise StaleEpoch(
                    f"reader {worker_id} is incarnation {epoch.incarnation}, but {newest} was here already"
                )
            self._incarnations[worker_id] = epoch.incarnation


def introduce(sock: socket.socket, identity: Identity, endpoint: PageEndpoint, deadline: Deadline) -> Welcome:
    """Shake hands as the reader. Raises the owner's refusal, PeerLost for garbage, OSError or EOFError."""
    handshake = [PROTOCOL, identity.token, identity.worker_id, str(identity.epoch), identity.fingerprint]
    send_frame(sock, [*handshake, str(endpoint.epoch)], deadline)
    try:
        answer = receive_frame(sock, HANDSHAKE_LIMIT_BYTES, deadline)
        welcome = _read_answer(answer)
    except InvalidRequest as error:
        raise PeerLost(f"{endpoint.address} does not speak {PROTOCOL}: {error.message}") from error
    _compare(welcome, endpoint, identity)
    return welcome


def mismatch(owner: str, theirs: object, reader: str, ours: object) -> str:
    return f"{owner} serves pages of {theirs!r}, {reader} reads {ours!r}: run both with the same model and options"


def _read_answer(answer: list[Any]) -> Welcome:
    if answer[:1] == ["refused"]:
        check_fields(answer, (str, str, str))
        _raise(answer[1], answer[2])
    check_fields(answer[:4], (str,) * 4)
    try:
        layout = layout_of(answer[4:])
    except ValueError as error:
        raise InvalidRequest(f"welcomed with other numbers than those of a layout: {error}") from error
    return Welcome(answer[1], _epoch(answer[2]), answer[3], layout)


def _raise(kind: str, message: str) -> NoReturn:
    if kind not in _REFUSALS:
        raise InvalidRequest(f"refused for an unknown reason {kind!r}")
    raise _REFUSALS[kind](message)


def _compare(welcome: Welcome, endpoint: PageEndpoint, identity: Identity) -> None:
    if welcome.epoch != endpoint.epoch:
        raise StaleEpoch(f"epoch {endpoint.epoch} of {welcome.worker_id} was meant, epoch {welcome.epoch} answered")
    theirs = (welcome.fingerprint, numbers_of(welcome.layout))
    ours = (identity.fingerprint, numbers_of(endpoint.layout))
    if theirs != ours:
        raise FingerprintMismatch(mismatch(welcome.worker_id, theirs, identity.worker_id, ours))


def _epoch(text: str) -> Epoch:
    try:
        return Epoch.parse(text)
    except ValueError as error:
        raise InvalidRequest(f"not an epoch: {text[:64]!r}") from error
