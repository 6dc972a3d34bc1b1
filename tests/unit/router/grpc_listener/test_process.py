"""The listener as the process that it is: with TLS, after its death, and when the router has gone."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import ssl
from pathlib import Path

import grpc
import grpc.aio
import psutil
import pytest

from router.grpc_listener.running import ListenerProcess
from tests.certificates import Authority
from tests.unit.router.grpc_listener.conftest import SERVICE, served
from tests.unit.router.grpc_listener.test_listener import ALONE, PATIENCE_S, echoed
from tests.unit.router.serving.asking import eventually


def process() -> psutil.Process:
    return next(each for each in psutil.Process().children() if any("grpc_listener" in part for part in each.cmdline()))


async def test_a_process_that_ends_is_started_again() -> None:
    async with served(ListenerProcess) as server:
        await echoed(server.address)
        first = process()
        first.kill()
        await asyncio.to_thread(first.wait, PATIENCE_S)
        await echoed(server.address)
        assert process().pid != first.pid
    assert not os.path.exists(server.listener.backend)  # noqa: ASYNC240


async def test_what_lies_in_the_working_directory_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "router").mkdir()
    (tmp_path / "router" / "__init__.py").write_text("raise SystemExit('not ours')")
    monkeypatch.chdir(tmp_path)
    async with served(ListenerProcess) as server:
        await echoed(server.address)


async def test_what_the_process_says_is_logged_and_known_reasons_are_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with served(ListenerProcess) as server:
        for line in ("headers 10.0.0.1", "frames 10.0.0.2", "else 10.0.0.3", "unreached path too long"):
            server.listener._hear(line)
        assert server.cuts == {"headers": 1, "frames": 1}
    said = [each.getMessage() for each in caplog.records if each.name == "router.grpc_listener.running"]
    assert said == [
        "a gRPC connection cost too much and was cut client=10.0.0.1 reason=headers",
        "clients of the gRPC port are closed: the router's socket cannot be reached error=path too long",
    ]


async def test_cuts_are_counted_by_their_reason() -> None:
    async with served(ListenerProcess) as server:
        await echoed(server.address)
        _, writer = await asyncio.open_connection(*server.address.split(":"))
        writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]))
        writer.write(bytes([0, 0, 0, 1, 0, 0, 0, 0, 1]) + bytes([0, 0, 0, 9, 0, 0, 0, 0, 1]) * 100)
        async with asyncio.timeout(PATIENCE_S):
            while not server.cuts:
                await asyncio.sleep(0.01)
        assert server.cuts == {"headers": 1}
        writer.transport.abort()


async def test_clients_show_their_certificates_where_they_must(tmp_path: Path) -> None:
    ours, theirs = Authority(tmp_path), Authority(tmp_path, "others")
    tls = ours.config(ours.issue("server"))
    async with served(ListenerProcess, tls=tls) as server:
        for authority, is_good in ((ours, True), (theirs, False)):
            shown = authority.issue(f"client-{is_good}")
            credentials = grpc.ssl_channel_credentials(
                ours.file.read_bytes(), shown.key.read_bytes(), shown.cert.read_bytes()
            )
            async with grpc.aio.secure_channel(server.address, credentials) as channel:
                call = channel.unary_unary(f"/{SERVICE}/Echo")(bytes(9 << 20 if is_good else 1), timeout=PATIENCE_S)
                code = await call.code()
                assert code is (grpc.StatusCode.RESOURCE_EXHAUSTED if is_good else grpc.StatusCode.UNAVAILABLE)
        with pytest.raises(grpc.aio.AioRpcError):
            await echoed(server.address)
        assert server.calls.hosts <= {"127.0.0.1"}


async def test_a_new_certificate_is_shown_to_the_next_client(tmp_path: Path) -> None:
    ours = Authority(tmp_path)
    issued = ours.issue("server")
    tls = ours.config(issued)
    async with served(ListenerProcess, tls=type(tls)(cert=tls.cert, key=tls.key)) as server:
        shown = [await _certificate(server.address)]
        ours.issue("server")
        shown.append(await _certificate(server.address))
        assert shown[0] != shown[1]


async def _certificate(address: str) -> bytes:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    _, writer = await asyncio.open_connection(*address.split(":"), ssl=context)
    try:
        tls = writer.get_extra_info("ssl_object")
        assert tls.selected_alpn_protocol() == "h2"
        return bytes(tls.getpeercert(binary_form=True))
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def test_sigterm_to_the_whole_group_lets_open_calls_finish() -> None:
    """systemd tells every process of a service; the router goes on for a while, and then ends this one."""
    async with served(ListenerProcess) as server, grpc.aio.insecure_channel(server.address, options=ALONE) as channel:
        call = channel.unary_unary(f"/{SERVICE}/Stall")(b"x")
        await eventually(lambda: bool(server.calls.seen))
        process().send_signal(signal.SIGTERM)
        await asyncio.sleep(0.5)
        assert process().is_running()
        assert not call.done()
        call.cancel()


async def test_where_no_descriptor_is_left_the_process_is_started_later(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe, has_failed = os.pipe, []

    def without_descriptors() -> tuple[int, int]:
        if not has_failed:
            has_failed.append(True)
            raise OSError(errno.EMFILE, "Too many open files")
        return pipe()

    async with served(ListenerProcess) as server:
        await echoed(server.address)
        monkeypatch.setattr(os, "pipe", without_descriptors)
        process().kill()
        await eventually(lambda: bool(has_failed))
        await echoed(server.address)
