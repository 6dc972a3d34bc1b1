"""Certificates that are replaced while processes call one another.

A gRPC server's configuration is replaced seldom: handshakes beside a replacement end the process (gRPC 1.85).
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from tests.certificates import Authority
from twostroke.rpc import tls
from twostroke.rpc.server import RpcServer
from twostroke.rpc.tls import SESSIONS_S, Renewal
from twostroke.rpc.v1 import control_pb2, control_pb2_grpc
from twostroke.security.tls import Certificates, CertificateUse


class Shown:
    """A renewal on a clock that the test moves, and the pauses that it made."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, *, asks_clients: bool) -> None:
        self.now_s = 0.0
        self.pauses: list[float] = []
        self.ca = Authority(folder)
        config = self.ca.config(self.ca.issue("server"))
        if not asks_clients:
            config = type(config)(cert=config.cert, key=config.key)
        monkeypatch.setattr(tls.time, "sleep", self.pauses.append)
        self.renewal = Renewal(Certificates(config, CertificateUse.CLIENTS), lambda: self.now_s)
        assert self.renewal.first() is not None


def test_handshakes_share_a_configuration_until_the_certificate_is_a_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = Shown(tmp_path, monkeypatch, asks_clients=False)
    shown.now_s = 10 * SESSIONS_S
    assert [shown.renewal.next() for _ in range(1000)] == [None] * 1000
    shown.ca.issue("server")
    assert shown.renewal.next() is not None
    assert shown.renewal.next() is None
    assert len(shown.pauses) == 1, "for the handshakes that hold the one before"


def test_sessions_of_clients_with_certificates_end_after_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = Shown(tmp_path, monkeypatch, asks_clients=True)
    assert shown.renewal.next() is None
    shown.now_s = SESSIONS_S + 1
    assert shown.renewal.next() is not None
    assert shown.renewal.next() is None


class Worker(control_pb2_grpc.ControlServicer):
    async def GetTrace(self, request: Any, context: Any) -> control_pb2.GetTraceResponse:  # noqa: N802
        return control_pb2.GetTraceResponse(stream=request.name)


async def test_a_call_that_proves_its_token_while_the_certificate_changes_is_answered(tmp_path: Path) -> None:
    ca = Authority(tmp_path)
    certificates = Certificates(ca.config(ca.issue("worker")), CertificateUse.CLUSTER)
    server = RpcServer("127.0.0.1", 0, token=None, certificates=certificates)
    control_pb2_grpc.add_ControlServicer_to_server(Worker(), server.server)
    await server.start()
    held, go_on = asyncio.Event(), asyncio.Event()

    class Held(grpc.aio.UnaryUnaryClientInterceptor):
        """Holds the first call where a proof would."""

        async def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
            if not held.is_set():
                held.set()
                await go_on.wait()
            return await continuation(client_call_details, request)

    channel = tls.RenewingChannel(server.address, certificates, (), [Held()])
    try:
        first = asyncio.ensure_future(_traced(channel, "first"))
        await held.wait()
        ca.issue("worker")
        assert await _traced(channel, "second") == "second"
        await asyncio.sleep(0)  # what leaves the channel has begun
        go_on.set()
        assert await first == "first"
    finally:
        await channel.close()
        await server.stop(0)


async def _traced(channel: grpc.aio.Channel, name: str) -> str:
    call = control_pb2_grpc.ControlStub(channel).GetTrace
    return str((await call(control_pb2.GetTraceRequest(name=name), timeout=60)).stream)
