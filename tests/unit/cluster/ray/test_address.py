"""A port of something else than Ray's head is told apart before Ray is loaded, which tries for minutes."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path

import grpc
import pytest

from cluster.cli import PROGRAM
from cluster.ray.address import ray_head_address
from tests.certificates import Authority
from tests.unit.cluster.ray.test_credentials import head, use

FILE = 'model: {model: "paced:step_ms=5"}\nprefill: {count: 1}\ndecode: {count: 1}\n'


def silent(connection: socket.socket) -> None:
    connection.settimeout(30)
    while connection.recv(1000):
        pass


def of_the_web(connection: socket.socket) -> None:
    connection.recv(1000)
    connection.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")


@contextlib.contextmanager
def listening(answer: Callable[[socket.socket], None]) -> Iterator[str]:
    """Each connection gets its answer in a thread of its own. Those that are still open at the end are closed."""

    def serve(connection: socket.socket) -> None:
        with connection:
            answer(connection)

    def accept() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            connections.append(connection)
            threads.append(threading.Thread(target=serve, args=(connection,)))
            threads[-1].start()

    connections: list[socket.socket] = []
    threads = [threading.Thread(target=accept)]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threads[0].start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
    for connection in connections:
        with contextlib.suppress(OSError):  # closed already
            connection.shutdown(socket.SHUT_RDWR)
    for thread in threads:
        thread.join()


@contextlib.contextmanager
def another_rpc_server() -> Iterator[str]:
    server = grpc.server(futures.ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


@pytest.fixture(autouse=True)
def nothing_of_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith("RAY_"):
            monkeypatch.delenv(name)


def up(address: str, tmp_path: Path) -> int:
    file = tmp_path / "cluster.yaml"
    file.write_text(FILE)
    return PROGRAM.main(["up", "-f", str(file), "--address", address])


@pytest.mark.parametrize("answer", [silent, of_the_web, socket.socket.close])
def test_up_at_a_port_of_something_else_ends_in_seconds(
    answer: Callable[[socket.socket], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    begun_s = time.monotonic()
    with listening(answer) as address:
        assert up(address, tmp_path) == 2
        assert time.monotonic() - begun_s < 30
    assert "what answers there is not a Ray head" in capsys.readouterr().err


def test_another_server_of_grpc_is_no_head(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with another_rpc_server() as address:
        assert up(address, tmp_path) == 2
    assert "what answers there is not a Ray head" in capsys.readouterr().err


def test_who_joins_with_tls_hears_as_soon_that_nothing_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    authority = Authority(tmp_path, "ours")
    use(monkeypatch, authority.issue("node"), authority)
    begun_s = time.monotonic()
    with listening(silent) as address:
        assert up(address, tmp_path) == 2
        assert time.monotonic() - begun_s < 30
    assert "does not speak TLS within 3 s" in capsys.readouterr().err


def test_a_head_that_wants_a_token_first_is_one() -> None:
    def refuse(request: bytes, context: grpc.ServicerContext) -> bytes:
        context.abort(grpc.StatusCode.UNAUTHENTICATED, "InvalidAuthToken")

    with head(answer=refuse) as address:
        assert ray_head_address(address) == address
