"""Certificates as gRPC takes them: servers ask for them at every handshake, clients when they open a channel."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from operator import methodcaller
from typing import Any

import grpc
import grpc.aio

from twostroke.base.credentials import CLUSTER_NAME
from twostroke.security.tls import Certificates, Pem

TAKES_CALLS_S = 60.0
"""How long a channel of an earlier certificate still takes calls. A call has a channel before it has proved the token,
and gRPC refuses calls over a channel that closes. A proof takes seconds at most."""
LINGER_S = 24 * 3600.0
"""For calls over a connection of an earlier certificate: longer than any answer; a stream without end begins again."""

SESSIONS_S = 600.0
"""How long clients may come back with a session, without showing their certificate again. gRPC itself gives them days,
and another configuration makes earlier sessions worthless."""
PAUSE_S = 0.05
"""Before a configuration is replaced: handshakes that have asked are through the few instructions in which they need
it, also on a machine that does other things."""

Options = tuple[tuple[str, int], ...]


def server_credentials(certificates: Certificates | None) -> grpc.ServerCredentials:
    if certificates is None:
        return grpc.insecure_server_credentials()

    renewal = Renewal(certificates)
    return grpc.dynamic_ssl_server_credentials(
        renewal.first(),
        renewal.next,  # type: ignore[arg-type]  # None: as before
        certificates.asks_clients,
    )


class Renewal:
    """What a gRPC server shows: another configuration where the certificate is a new one, and at times for sessions.

    gRPC (1.85) takes a configuration away from handshakes that are about to use it: where another one came with every
    handshake, some thousand attempts of a stranger ended the process. So another one comes seldom, and after a pause in
    which those handshakes continue. gRPC asks on one thread at a time.
    """

    def __init__(self, certificates: Certificates, clock: Callable[[], float] = time.monotonic) -> None:
        self._certificates = certificates
        self._clock = clock
        self._shown = certificates.pem
        self._since_s = clock()

    def first(self) -> grpc.ServerCertificateConfiguration:
        return _configuration(self._shown)

    def next(self) -> grpc.ServerCertificateConfiguration | None:
        """Returns new certificates to use, if any. gRPC calls it on a thread of its own before each handshake."""
        pem = self._certificates.pem
        is_old = self._certificates.asks_clients and self._clock() - self._since_s > SESSIONS_S
        if pem is self._shown and not is_old:
            return None
        self._shown, self._since_s = pem, self._clock()
        time.sleep(PAUSE_S)
        return _configuration(pem)


class RenewingChannel(grpc.aio.Channel):
    """gRPC shows the certificate that a channel was opened with for ever. This one opens another channel for the next
    call once the certificate is a new one; calls that are under way end where they began."""

    def __init__(
        self,
        address: str,
        certificates: Certificates,
        options: Options,
        interceptors: Sequence[grpc.aio.ClientInterceptor] = (),
    ) -> None:
        self._address = address
        self._interceptors = list(interceptors)
        self._certificates = certificates
        self._options = [*options, ("grpc.ssl_target_name_override", CLUSTER_NAME)]
        self._shown = certificates.pem
        self._channel = self._open()
        self._leaving: dict[asyncio.Task[None], grpc.aio.Channel] = {}

    async def close(self, grace: float | None = None) -> None:
        for task, channel in tuple(self._leaving.items()):
            task.cancel()
            await channel.close(grace)
        await self._channel.close(grace)

    def unary_unary(self, *method: Any, **codecs: Any) -> Any:
        return self._calls(methodcaller("unary_unary", *method, **codecs))

    def unary_stream(self, *method: Any, **codecs: Any) -> Any:
        return self._calls(methodcaller("unary_stream", *method, **codecs))

    def stream_unary(self, *method: Any, **codecs: Any) -> Any:
        return self._calls(methodcaller("stream_unary", *method, **codecs))

    def stream_stream(self, *method: Any, **codecs: Any) -> Any:
        return self._calls(methodcaller("stream_stream", *method, **codecs))

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._now().get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._now().channel_ready()

    async def __aenter__(self) -> RenewingChannel:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    def _calls(self, opened: Callable[[grpc.aio.Channel], Any]) -> Any:
        """Returns what makes calls of one method, over the channel of their time."""

        def call(*request: Any, **options: Any) -> Any:
            return opened(self._now())(*request, **options)

        return call

    def _now(self) -> grpc.aio.Channel:
        pem = self._certificates.pem
        if pem is not self._shown:
            before, self._shown, self._channel = self._channel, pem, self._open()
            leaving = asyncio.get_running_loop().create_task(_leave(before), name=f"leave {self._address}")
            self._leaving[leaving] = before
            leaving.add_done_callback(lambda task: self._leaving.pop(task, None))
        return self._channel

    def _open(self) -> grpc.aio.Channel:
        pem = self._shown
        credentials = grpc.ssl_channel_credentials(pem.ca, pem.key, pem.cert)
        return grpc.aio.secure_channel(
            self._address, credentials, options=self._options, interceptors=self._interceptors
        )


async def _leave(channel: grpc.aio.Channel) -> None:
    """Closes a channel after the last call that has chosen it."""
    await asyncio.sleep(TAKES_CALLS_S)
    await channel.close(LINGER_S)


def _configuration(pem: Pem) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(pem.key, pem.cert)], pem.ca)
