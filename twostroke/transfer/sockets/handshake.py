"""The handshake opens a page connection: the reader names itself and the epoch it means, the owner admits or refuses.

    owner -> reader  [protocol, its nonce]
    reader -> owner  [protocol, its nonce, its worker id, its epoch, fingerprint, the epoch that it means, proof]
    owner -> reader  ["welcome", proof, worker id, epoch, fingerprint, then for each region: its pages, the
                  bytes of one page]
                 or ["refused", error class, message]

A frame of any other kind ends the connection without an answer. A proof is computed from the cluster's token, both
nonces and everything that its sender says. It does not reveal the token. Each proof fits one pair of nonces, so it
cannot be used again. Without TLS a listener in between can still relay a handshake that is under way. A reader accepts
pages only from an owner that has the token.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import threading
from collections import Counter
from dataclasses import dataclass
from typing import Any

from twostroke.base.credentials import prove
from twostroke.base.errors import FingerprintMismatch, InvalidRequest, PeerLost, ServeError, StaleEpoch, Unauthenticated
from twostroke.base.fault_points import Point, reach
from twostroke.base.ids import Epoch
from twostroke.kv_cache.layout import PoolLayout
from twostroke.transfer.base import Identity, PageEndpoint, layout_of, numbers_of
from twostroke.transfer.sockets.frames import Deadline, check_fields, receive_frame, send_frame

PROTOCOL = "twostroke-pages/3"
HANDSHAKE_LIMIT_BYTES = 16 << 10
"""Largest frame that is read from an unknown reader: nonce, ids and fingerprint are short."""
NONCE_BYTES = 16
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
        """Admits a reader and returns its worker id. Raises the refusal, or InvalidRequest for garbage."""
        nonce = draw_nonce()
        send_frame(sock, [PROTOCOL, nonce], deadline)
        fields = receive_frame(sock, HANDSHAKE_LIMIT_BYTES, deadline)
        check_fields(fields, (str, bytes, str, str, str, str, bytes))
        try:
            proof = _proof(self._identity.token, "reader", nonce, fields[1], [fields[0], *fields[2:6]])
            if not hmac.compare_digest(fields[6], proof):
                raise Unauthenticated("the reader does not have this cluster's token")
            self._check(fields[0], fields[2:6])
        except (Unauthenticated, StaleEpoch, FingerprintMismatch) as refusal:
            send_frame(sock, ["refused", type(refusal).__name__, refusal.message], deadline)
            raise
        reach(Point.TRANSPORT_GREETED)
        me = self._identity
        fields_sent = [me.worker_id, str(me.epoch), me.fingerprint, *numbers_of(self._layout)]
        send_frame(sock, ["welcome", _proof(me.token, "owner", nonce, fields[1], fields_sent), *fields_sent], deadline)
        return str(fields[2])

    def refuse(self, reason: str) -> None:
        """Counts a refused connection."""
        with self._lock:
            self.refused[reason] += 1

    def _check(self, protocol: str, fields: list[str]) -> None:
        worker_id, epoch, fingerprint, meant = fields
        me = self._identity
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
    """Performs the handshake as the reader.

    Raises the owner's refusal, FingerprintMismatch for another protocol, PeerLost for garbage, OSError or EOFError.
    """
    try:
        greeting = receive_frame(sock, HANDSHAKE_LIMIT_BYTES, deadline)
        check_fields(greeting, (str, bytes))
        if greeting[0] != PROTOCOL:
            raise FingerprintMismatch(
                f"{endpoint.address} speaks {greeting[0][:64]!r}, this reader {PROTOCOL!r}: run both with one version"
            )
        nonces = greeting[1], draw_nonce()
        send_frame(sock, reader_frame(identity, endpoint.epoch, *nonces), deadline)
        answer = receive_frame(sock, HANDSHAKE_LIMIT_BYTES, deadline)
        welcome = _read_answer(answer, identity.token, *nonces)
    except InvalidRequest as error:
        raise PeerLost(f"{endpoint.address} failed the handshake of {PROTOCOL}: {error.message}") from error
    _compare(welcome, endpoint, identity)
    return welcome


def draw_nonce() -> bytes:
    return secrets.token_bytes(NONCE_BYTES)


def reader_frame(identity: Identity, meant: Epoch, owner_nonce: bytes, reader_nonce: bytes) -> list[Any]:
    """Returns the frame with which a reader answers the owner's nonce."""
    fields_sent = [identity.worker_id, str(identity.epoch), identity.fingerprint, str(meant)]
    return [
        PROTOCOL,
        reader_nonce,
        *fields_sent,
        _proof(identity.token, "reader", owner_nonce, reader_nonce, [PROTOCOL, *fields_sent]),
    ]


def mismatch(owner: str, theirs: object, reader: str, ours: object) -> str:
    return f"{owner} serves pages of {theirs!r}, {reader} reads {ours!r}: run both with the same model and options"


def _proof(token: str, side: str, owner_nonce: bytes, reader_nonce: bytes, fields_sent: list[Any]) -> bytes:
    return prove(token, f"pages {side}", owner_nonce, reader_nonce, *map(str, fields_sent))


def _read_answer(answer: list[Any], token: str, owner_nonce: bytes, reader_nonce: bytes) -> Welcome:
    if answer[:1] == ["refused"]:
        check_fields(answer, (str, str, str))
        if answer[1] not in _REFUSALS:
            raise InvalidRequest(f"refused for an unknown reason {answer[1]!r}")
        raise _REFUSALS[answer[1]](answer[2])
    check_fields(answer[:5], (str, bytes, str, str, str))
    if answer[0] != "welcome" or not hmac.compare_digest(
        answer[1], _proof(token, "owner", owner_nonce, reader_nonce, answer[2:])
    ):
        raise InvalidRequest("it did not prove that it has this cluster's token")
    try:
        layout = layout_of(answer[5:])
    except ValueError as error:
        raise InvalidRequest(f"welcomed with other numbers than those of a layout: {error}") from error
    return Welcome(answer[2], _epoch(answer[3]), answer[4], layout)


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
