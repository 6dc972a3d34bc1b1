"""Lets gRPC servers and clients change to a renewed certificate while they run."""

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
"""Seconds before an old channel is closed. A call chooses its channel first and proves the token then, which takes
seconds at most. gRPC refuses new calls on a channel that is being closed."""
LINGER_S = 24 * 3600.0
"""Seconds that calls on an old channel may still take: longer than any answer. An endless stream is opened again."""

SESSIONS_S = 600.0
"""Seconds for which clients may resume a TLS session without showing their certificate again. gRPC alone would allow
days. A new configuration ends all earlier sessions."""
PAUSE_S = 0.05
"""Pause before a configuration is replaced. Handshakes use the old one for a few instructions after they asked for it;
this is long enough for them, also on a busy machine."""

Options = tuple[tuple[str, int], ...]


def server_credentials(certificates: Certificates | None) -> grpc.ServerCredentials:
    if certificates is None:
        return grpc.insecure_server_credentials()

    renewal = Renewal(certificates)
    return grpc.dynamic_ssl_server_credentials(
        renewal.first(),
        renewal.next,  # type: ignore[arg-type]  # None: keep the old one
        certificates.asks_clients,
    )


class Renewal:
    """Gives a gRPC server a new configuration when the certificate was renewed, and when sessions have become too old.

    It must do so seldom. gRPC (1.85) frees the old configuration although other handshakes may be about to use it. With
    a new configuration for every handshake, a few thousand connections of a stranger crashed the process. So a new one
    is rare, and comes after a pause (`PAUSE_S`). gRPC asks on one thread at a time.
    """

    def __init__(self, certificates: Certificates, clock: Callable[[], float] = time.monotonic) -> None:
        self._certificates = certificates
        self._clock = clock
        self._shown = certificates.pem
        self._since_s = clock()

    def first(self) -> grpc.ServerCertificateConfiguration:
        return _configuration(self._shown)

    def next(self) -> grpc.ServerCertificateConfiguration | None:
        """Returns a new configuration, or None for the old one. gRPC calls it before each handshake."""
        pem = self._certificates.pem
        is_old = self._certificates.asks_clients and self._clock() - self._since_s > SESSIONS_S
        if pem is self._shown and not is_old:
            return None
        self._shown, self._since_s = pem, self._clock()
        time.sleep(PAUSE_S)
        return _configuration(pem)


class RenewingChannel(grpc.aio.Channel):
    """A channel that changes to a renewed certificate.

    A gRPC channel keeps the certificate that it was opened with. So this one opens a new channel for the next call
    after a renewal. Calls in progress finish on the old one.
    """

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
        return self._current().get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._current().channel_ready()

    async def __aenter__(self) -> RenewingChannel:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    def _calls(self, opened: Callable[[grpc.aio.Channel], Any]) -> Any:
        """Returns a function that calls one method on the channel that is current when it is called."""

        def call(*request: Any, **options: Any) -> Any:
            return opened(self._current())(*request, **options)

        return call

    def _current(self) -> grpc.aio.Channel:
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
    """Closes an old channel when no call can choose it any more. Calls in progress may finish."""
    await asyncio.sleep(TAKES_CALLS_S)
    await channel.close(LINGER_S)


def _configuration(pem: Pem) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(pem.key, pem.cert)], pem.ca)
