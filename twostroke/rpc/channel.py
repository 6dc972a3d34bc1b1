"""Client channels to other processes of the cluster: the token is proved, death noticed in a second or two."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import Message

from twostroke.base.errors import Cancelled, DeadlineExceeded, InternalError, PeerLost, ServeError, Unauthenticated
from twostroke.rpc.convert import rebuild_error
from twostroke.rpc.membership import Membership
from twostroke.rpc.proof import NO_RETRIES, CallProver
from twostroke.rpc.server import ERROR_FIELD_KEY, ERROR_KIND_KEY, MAX_MESSAGE_BYTES
from twostroke.rpc.tls import RenewingChannel

Response = TypeVar("Response")
Metadata = tuple[tuple[str, str], ...]

MOST_TIMEOUT_S = 86_400.0
"""The longest timeout of a call, one day. gRPC takes a deadline some hundred years ahead for one that has passed."""

_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 1000),
    ("grpc.keepalive_timeout_ms", 2000),
    (
        "grpc.http2.ping_timeout_ms",
        2000,
    ),  # gRPC 1.85 lets an unanswered keepalive ping wait for this, a minute by default
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1000),  # what one attempt may take: a process that is short of CPU is not dead
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.use_local_subchannel_pool", 1),
    NO_RETRIES,
)

_BY_STATUS: dict[grpc.StatusCode, type[ServeError]] = {
    grpc.StatusCode.UNAVAILABLE: PeerLost,
    grpc.StatusCode.CANCELLED: Cancelled,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
}


class TlsEndpoint(NamedTuple):
    """The credentials and options with which a client reaches an endpoint that takes TLS."""

    credentials: grpc.ChannelCredentials
    options: tuple[tuple[str, Any], ...]


class PeerChannel:
    """One connection to one process; pass `metadata` with every call made over `channel`.

    Before a call is sent, both sides prove that they have the cluster's token (`proof`)."""

    def __init__(self, address: str, membership: Membership | str, endpoint: TlsEndpoint | None = None) -> None:
        """`membership` is what this process proves. `endpoint` is for a client that is not a process of the cluster."""
        membership = Membership(membership) if isinstance(membership, str) else membership
        self.address = address
        prover = CallProver(membership.token, address)
        interceptors, certificates = prover.interceptors(), membership.certificates
        if endpoint is not None:
            options = [*_OPTIONS, *endpoint.options]
            channel = grpc.aio.secure_channel(address, endpoint.credentials, options=options, interceptors=interceptors)
        elif certificates is not None:
            channel = RenewingChannel(address, certificates, _OPTIONS, interceptors)
        else:
            channel = grpc.aio.insecure_channel(address, options=_OPTIONS, interceptors=interceptors)
        self.channel = prover.attach(channel)
        self.metadata: Metadata = ()

    async def call(self, method: Callable[..., Awaitable[Response]], request: Message, timeout_s: float) -> Response:
        """Returns the response to a unary call. Raises the ServeError that its failure means."""
        try:
            return await method(request, metadata=self.metadata, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise error_of(error, self.address) from error

    async def close(self) -> None:
        await self.channel.close()


def error_of(rpc_error: grpc.aio.AioRpcError, address: str) -> ServeError:
    """Returns the ServeError that the other side raised, or what a broken connection means."""
    trailing: dict[str, Any] = {str(key): value for key, value in rpc_error.trailing_metadata() or ()}
    kind = trailing.get(ERROR_KIND_KEY)
    details = rpc_error.details() or rpc_error.code().name
    if isinstance(kind, str):
        field = trailing.get(ERROR_FIELD_KEY)
        return rebuild_error(kind, details, field.decode() or None if isinstance(field, bytes) else None)
    return _BY_STATUS.get(rpc_error.code(), InternalError)(f"{address}: {details}")


def call_timeout_s(seconds: float) -> float:
    """Returns a timeout that gRPC can carry, from 0 to MOST_TIMEOUT_S, which stands for NaN and infinity, too."""
    return max(0.0, seconds) if seconds < MOST_TIMEOUT_S else MOST_TIMEOUT_S


def is_refusal(error: ServeError) -> bool:
    """Returns whether no process listens at the address, which only the system's message tells."""
    return isinstance(error, PeerLost) and "Connection refused" in error.message
