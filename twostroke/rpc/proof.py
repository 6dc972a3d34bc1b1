"""Proof that a caller and a server of one cluster have its token, which neither of them sends.

    caller -> server   Begin: nonce, the address that it dials, mark("caller" ...)
    server -> caller   its own nonce, mark("server" ...)
    caller -> server   every other call: its nonce, and the mark of the method under the key of the two nonces

The caller sends no other message before the server has proved itself over the same connection. The server's nonce is
drawn once per server, so a mark is worth nothing at another one, and after the server's end. The address must be one of
the server's own: no process can pass a dead server's calls on to another server of this or another host.
"""

from __future__ import annotations

import asyncio
import functools
import hmac
import ipaddress
import secrets
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import grpc
import grpc.aio
import msgpack

from twostroke.base.credentials import prove
from twostroke.base.errors import InvalidRequest, Unauthenticated

BEGIN = "/twostroke.v1.Proof/Begin"
"""The path of the only call of the protocol. Its messages are msgpack, its caller needs no proof."""
PROOF_KEY = "twostroke-proof"
"""The metadata that every other call carries: the caller's nonce and the method's mark."""
TOKEN_KEY = "twostroke-token"
"""Metadata of an operator's own client that shows the token itself. No client of twostroke sends it."""
NONCE_BYTES = 16
BEGIN_S = 5.0
"""Time limit of `Begin`, where the call that waits for it has no shorter one."""
NO_RETRIES = ("grpc.enable_retries", 0)
"""For callers' channels: gRPC would repeat a call that met a dying server at the process with its port then."""
CLOSED = "the channel to it was closed"
"""What a caller is told whose channel was closed before the call was sent. gRPC raises UsageError."""
REMEMBERED_MARKS = 4096
"""Marks that a server keeps computed: a caller has one for each method."""

Metadata = Sequence[tuple[str, str | bytes]]


def check_dialled(address: str, own: Sequence[str]) -> None:
    """Raises Unauthenticated where a caller has dialled another address than those that this process listens on.

    Their ports are compared, and their hosts where both are addresses of one host: a name may lead here, and so may
    loopback and what stands for all addresses of a host.
    """
    host, _, port = address.rpartition(":")
    for each in own:
        own_host, _, own_port = each.rpartition(":")
        if port == own_port and len({_host_address(host), _host_address(own_host)} - {None}) < 2:
            return
    listens = " and ".join(own)
    raise Unauthenticated(f"the caller dialled {address[:64]!r}, this process listens on {listens}: dial that one")


def _host_address(host: str) -> str | None:
    """Returns the address of a single host, or None for anything else."""
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return None
    return None if address.is_loopback or address.is_unspecified else str(address)


class CallVerifier:
    """The server's side: proves the token to callers, and checks the marks of their calls."""

    def __init__(self, token: str) -> None:
        self._token = token
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._mark_of = functools.lru_cache(REMEMBERED_MARKS)(self._computed_mark)

    def begin(self, request: bytes, own: Sequence[str]) -> bytes:
        """Returns the answer to `Begin` at a server with these addresses. Raises InvalidRequest or Unauthenticated."""
        nonce, address, mark = _unpacked(request, (bytes, str, bytes))
        if not hmac.compare_digest(mark, prove(self._token, "caller", nonce, address)):
            raise Unauthenticated("the caller does not have this cluster's token")
        check_dialled(address, own)
        return bytes(msgpack.packb([self._nonce, prove(self._token, "server", nonce, self._nonce, address)]))

    def check(self, metadata: Metadata | None, method: str) -> None:
        """Raises Unauthenticated unless the caller has proved for `method` that it has the token, or has shown it."""
        shown = {key: value for key, value in metadata or () if key in (PROOF_KEY, TOKEN_KEY)}
        if PROOF_KEY in shown:
            nonce, _, mark = _text(shown[PROOF_KEY]).partition(".")
            is_nonce = len(nonce) == 2 * NONCE_BYTES  # what strangers say is remembered, too: no more than this
            if is_nonce and hmac.compare_digest(mark.encode(), self._mark_of(nonce, method).encode()):
                return
            raise Unauthenticated(f"{PROOF_KEY} metadata is not of this process and this cluster's token")
        if not hmac.compare_digest(_text(shown.get(TOKEN_KEY, "")).encode(), self._token.encode()):
            raise Unauthenticated(f"{PROOF_KEY} metadata is missing, or {TOKEN_KEY} is not this cluster's token")

    def _computed_mark(self, nonce: str, method: str) -> str:
        try:
            return _Session(self._token, bytes.fromhex(nonce), self._nonce).mark(method)
        except ValueError:
            return secrets.token_hex()


class _Session:
    """A caller's nonce and a server's, and the key that both make of them."""

    def __init__(self, token: str, caller: bytes, server: bytes) -> None:
        self._caller = caller
        self._key = prove(token, "session", caller, server).hex()
        self._shown: dict[str, tuple[str, str]] = {}

    def mark(self, method: str) -> str:
        return prove(self._key, "call", method).hex()

    def shown(self, method: str) -> tuple[str, str]:
        """Returns the metadata of a call."""
        if method not in self._shown:
            self._shown[method] = (PROOF_KEY, f"{self._caller.hex()}.{self.mark(method)}")
        return self._shown[method]


class _Opening:
    """A caller's side of `Begin`."""

    def __init__(self, token: str, address: str) -> None:
        self._token = token
        self._address = address
        self._nonce = secrets.token_bytes(NONCE_BYTES)

    def request(self) -> bytes:
        return bytes(
            msgpack.packb([self._nonce, self._address, prove(self._token, "caller", self._nonce, self._address)])
        )

    def session(self, answer: bytes) -> _Session | None:
        """Returns a session. None: the server did not prove that it has the token."""
        try:
            nonce, mark = _unpacked(answer, (bytes, bytes))
        except InvalidRequest:
            return None
        if not hmac.compare_digest(mark, prove(self._token, "server", self._nonce, nonce, self._address)):
            return None
        return _Session(self._token, self._nonce, nonce)


class CallProver:
    """The caller's side over one channel of grpc.aio: begins where a connection is new, and marks every call."""

    def __init__(self, token: str, address: str) -> None:
        self._token = token
        self._address = address
        self._channel: grpc.aio.Channel | None = None
        self._session: _Session | None = None
        self._beginning = asyncio.Lock()

    def interceptors(self) -> list[grpc.aio.ClientInterceptor]:
        """Returns the interceptors of the channel that `attach` names."""
        return [_UnaryMarks(self), _StreamMarks(self)] if self._token else []

    def attach(self, channel: grpc.aio.Channel) -> grpc.aio.Channel:
        self._channel = channel
        return channel

    async def marked(self, details: grpc.aio.ClientCallDetails) -> grpc.aio.ClientCallDetails:
        """Returns the details of a call with its mark. Raises AioRpcError where the server does not prove itself."""
        method = _text(details.method)
        if method == BEGIN:
            return details
        session, timeout_s = self._current(), details.timeout
        if session is None:
            began_s = time.monotonic()
            session = await self._begun(timeout_s, details.wait_for_ready)
            timeout_s = timeout_s and max(0.0, timeout_s - (time.monotonic() - began_s))
        metadata = grpc.aio.Metadata(*(details.metadata or ()), session.shown(method))
        return grpc.aio.ClientCallDetails(
            details.method, timeout_s, metadata, details.credentials, details.wait_for_ready
        )

    async def sent(self, continuation: Any, details: grpc.aio.ClientCallDetails, request: Any) -> Any:
        """Returns a marked call once it is sent. Raises AioRpcError where its channel was closed meanwhile.

        It begins anew after a call that ended for want of a connection, or of a mark that its server knows.
        """
        marked = await self.marked(details)
        try:
            call = await continuation(marked, request)
        except grpc.aio.UsageError as error:
            raise _ended(f"{CLOSED}: nothing was sent") from error
        call.add_done_callback(self._ended)
        return call

    def _ended(self, call: Any) -> None:
        if call.cancelled():
            return
        task = asyncio.ensure_future(call.code())
        task.add_done_callback(self._forget_where_lost)

    def _forget_where_lost(self, code: asyncio.Future[grpc.StatusCode]) -> None:
        if not code.cancelled() and code.result() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNAUTHENTICATED):
            self._session = None

    def _current(self) -> _Session | None:
        """Returns the session of the connection that is open."""
        assert self._channel is not None
        if self._channel.get_state() is not grpc.ChannelConnectivity.READY:
            self._session = None
        return self._session

    async def _begun(self, timeout_s: float | None, wait_for_ready: bool | None) -> _Session:
        """Returns the session, within the time of the call that needs it, also where another call begins one.

        Raises AioRpcError: UNAUTHENTICATED where the server refuses, DEADLINE_EXCEEDED where the call's own time is
        over, and else UNAVAILABLE, whatever the trouble: the call was not sent.
        """
        has_less = timeout_s is not None and timeout_s < BEGIN_S
        limit_s = timeout_s if timeout_s is not None and has_less else BEGIN_S
        try:
            async with asyncio.timeout(limit_s):
                return await self._begin(limit_s, wait_for_ready)
        except TimeoutError:
            code, details = (
                grpc.StatusCode.DEADLINE_EXCEEDED,
                "it did not prove in time that it has this cluster's token",
            )
        except grpc.aio.AioRpcError as error:
            code, details = error.code(), error.details() or error.code().name
            if code is grpc.StatusCode.UNAUTHENTICATED:
                raise
        except grpc.aio.UsageError:
            code, details = grpc.StatusCode.UNAVAILABLE, CLOSED
        is_over = has_less and code is grpc.StatusCode.DEADLINE_EXCEEDED
        raise _ended(f"{details}: nothing was sent", code if is_over else grpc.StatusCode.UNAVAILABLE)

    async def _begin(self, limit_s: float, wait_for_ready: bool | None) -> _Session:
        assert self._channel is not None
        async with self._beginning:
            session = self._current()
            if session is not None:
                return session
            opening = _Opening(self._token, self._address)
            call: Any = self._channel.unary_unary(BEGIN)
            answer = await call(opening.request(), timeout=limit_s, wait_for_ready=wait_for_ready)
            session = self._session = opening.session(answer)
            if session is None:
                raise _impostor(self._address)
            return session


class _UnaryMarks(grpc.aio.UnaryUnaryClientInterceptor):
    def __init__(self, prover: CallProver) -> None:
        self._prover = prover

    async def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return await self._prover.sent(continuation, client_call_details, request)


class _StreamMarks(grpc.aio.UnaryStreamClientInterceptor):
    def __init__(self, prover: CallProver) -> None:
        self._prover = prover

    async def intercept_unary_stream(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return await self._prover.sent(continuation, client_call_details, request)


class _Details(NamedTuple):
    method: str
    timeout: float | None
    metadata: Metadata
    credentials: grpc.CallCredentials | None
    wait_for_ready: bool | None
    compression: grpc.Compression | None


class _BlockingMarks(grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor):
    """Begins before every call: commands make few of them, each over a channel of its own."""

    def __init__(self, token: str, address: str, channel: grpc.Channel) -> None:
        self._token = token
        self._address = address
        self._channel = channel

    def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return continuation(self._marked(client_call_details), request)

    def intercept_unary_stream(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return continuation(self._marked(client_call_details), request)

    def _marked(self, details: Any) -> _Details:
        opening = _Opening(self._token, self._address)
        limit_s = BEGIN_S if details.timeout is None else min(details.timeout, BEGIN_S)
        call: Any = self._channel.unary_unary(BEGIN)
        session = opening.session(call(opening.request(), timeout=limit_s))
        if session is None:
            raise _impostor(self._address)
        metadata = (*(details.metadata or ()), session.shown(_text(details.method)))
        return _Details(
            _text(details.method),
            details.timeout,
            metadata,
            details.credentials,
            details.wait_for_ready,
            details.compression,
        )


def proving_channel(address: str, token: str, options: Sequence[tuple[str, Any]] = ()) -> grpc.Channel:
    """Opens a plain blocking channel. Its calls prove that the caller has `token`; none do where it is empty."""
    channel = grpc.insecure_channel(address, options=[*options, NO_RETRIES])
    return grpc.intercept_channel(channel, _BlockingMarks(token, address, channel)) if token else channel


def _impostor(address: str) -> grpc.aio.AioRpcError:
    """Returns the end of a call to a server that has not proved itself, as if no process listened there."""
    return _ended(f"the process that listens on {address} did not prove that it has this cluster's token")


def _ended(details: str, code: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details=details)


def _unpacked(message: bytes, kinds: tuple[type, ...]) -> list[Any]:
    """Raises InvalidRequest unless `message` is a list of these kinds."""
    try:
        fields = msgpack.unpackb(message)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise InvalidRequest("a message of the proof of the token is not msgpack") from error
    if not isinstance(fields, list) or [type(field) for field in fields] != list(kinds):
        raise InvalidRequest("a message of the proof of the token has other fields than the protocol says")
    return fields


def _text(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode(errors="replace")
