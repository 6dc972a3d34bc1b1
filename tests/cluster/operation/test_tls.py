"""A cluster whose doors and connections take certificates: who has the right one is served, nobody else is heard."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import grpc
import grpc.aio
import psutil
import pytest

from cluster.flags.client_credentials import ClientTls
from tests.certificates import DAY, Authority, Issued
from tests.cluster.processes import TOKEN, Client, ProcessCluster, WorkerProcess, port_of, running_cluster
from tests.process_table import listening_ports
from tests.unit.worker.rig import paced, prompt_of
from tools.cli import main
from tools.clients.connect import tls_endpoint
from tools.clients.resuming import ResumingClient
from twostroke.base.credentials import CLUSTER_NAME
from twostroke.base.ids import Epoch
from twostroke.config import ModelConfig
from twostroke.rpc.channel import PeerChannel
from twostroke.rpc.membership import Membership
from twostroke.rpc.v1 import control_pb2, control_pb2_grpc
from twostroke.transfer.base import Identity
from twostroke.transfer.sockets.frames import Deadline, receive_frame, send_frame
from twostroke.transfer.sockets.handshake import reader_frame
from twostroke.transfer.sockets.tls import TlsSocket

ANSWER_S = 90.0


class World:
    """A CA for clients and doors, one for the cluster, and a stranger's."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.clients, self.cluster, self.stranger = (Authority(folder, name) for name in ("clients", "cluster", "x"))
        self.endpoint = self.clients.issue("endpoint", names=("localhost",))
        self.client = self.clients.issue("client", names=("alice",))
        self.worker = self.cluster.issue("worker")

    def seen_by(self, shown: Issued | None, ca: Authority | None = None) -> ClientTls:
        """A client that believes in `ca`, the doors' own unless another is named."""
        shows = (None, None) if shown is None else (str(shown.cert), str(shown.key))
        return ClientTls(ca=(ca or self.clients).file.read_bytes(), cert=shows[0], key=shows[1], name="localhost")


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


@contextlib.asynccontextmanager
async def tls_cluster(world: World, **options: int) -> AsyncIterator[ProcessCluster]:
    endpoints, cluster = world.clients.config(world.endpoint), world.cluster.config(world.worker)
    async with running_cluster(
        prefill=1,
        decode=1,
        model=paced(),
        policy="random",  # prompts are computed at the prefill worker, however short
        transports=("tcp",),
        tls=endpoints,
        cluster_tls=cluster,
        **options,
    ) as running:
        yield running


async def asked_over_grpc(cluster: ProcessCluster, tls: ClientTls | None, seed: int) -> str:
    """ "served", or the status."""
    client = Client(cluster.grpc, None if tls is None else tls_endpoint(tls))
    try:
        tokens = await client.tokens(prompt_of(200, seed=seed), max_tokens=4, ignore_eos=True)
        return "served" if len(tokens) == 4 else "cut"
    except grpc.aio.AioRpcError as error:
        return error.code().name
    finally:
        await client.close()


def asked_over_http(address: str, tls: ClientTls | None) -> str:
    """The first line of the answer, or "refused"."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=ANSWER_S) as sock:
            encrypted = sock if tls is None else tls.context().wrap_socket(sock, server_hostname=tls.name)
            with encrypted:
                encrypted.sendall(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
                return encrypted.makefile("rb").readline().decode().strip() or "refused"
    except OSError:
        return "refused"


def page_port_says(worker: WorkerProcess, context: ssl.SSLContext | None, token: str) -> bytes:
    """To a reader that proves the token; nothing where the connection is ended."""
    identity = f"{worker.info['fingerprint']};form={ModelConfig().dtype}"
    reader, owner = Identity("w", Epoch(1, 1), identity, token), Epoch.parse(str(worker.info["epoch"]))
    listening = listening_ports(psutil.Process(worker.process.pid))
    (port,) = listening - {port_of(str(worker.info[name])) for name in ("address", "metrics_address")}
    if context is not None:
        context.sslsocket_class = TlsSocket
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=ANSWER_S) as sock:
            encrypted = sock if context is None else context.wrap_socket(sock, server_hostname=CLUSTER_NAME)
            with encrypted:
                deadline = Deadline.after(ANSWER_S)
                _, nonce = receive_frame(encrypted, 4096, deadline)
                send_frame(encrypted, reader_frame(reader, owner, nonce, bytes(16)), deadline)
                return encrypted.recv(4096)
    except (OSError, EOFError):
        return b""


async def told_by_worker(address: str, membership: Membership | str, tls: ClientTls | None = None) -> str:
    """`tls`: shown instead of what `membership` shows."""
    peer = PeerChannel(address, membership, None if tls is None else tls_endpoint(tls))
    try:
        stub = control_pb2_grpc.ControlStub(peer.channel)
        request = control_pb2.GetServerInfoRequest()
        return str((await stub.GetServerInfo(request, metadata=peer.metadata, timeout=ANSWER_S)).server_id)
    except grpc.aio.AioRpcError as error:
        return error.code().name
    finally:
        await peer.close()


async def test_who_has_the_right_certificate_is_served_and_nobody_else_is_heard(
    world: World, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    expired = world.clients.issue("expired", lasts=-DAY)
    strangers = {
        "plain": None,
        "no certificate": world.seen_by(None),
        "a stranger's": world.seen_by(world.stranger.issue("mallory")),
        "expired": world.seen_by(expired),
        "one of the cluster, not of clients": world.seen_by(world.worker),
        "believes in another CA": world.seen_by(world.client, world.stranger),
        "looks for another name": replace(world.seen_by(world.client), name="elsewhere"),
    }
    async with tls_cluster(world, routers=2) as cluster:
        right = world.seen_by(world.client)
        assert await asked_over_grpc(cluster, right, seed=1) == "served"
        assert await asyncio.to_thread(asked_over_http, cluster.routers[0].http, right) == "HTTP/1.1 200 OK"
        for who, tls in strangers.items():
            assert await asked_over_grpc(cluster, tls, seed=2) == "UNAVAILABLE", who
            assert await asyncio.to_thread(asked_over_http, cluster.routers[0].http, tls) == "refused", who

        assert cluster.metric("decode-0", "twostroke_pull_bytes_total") > 0, "pages came over TLS"
        for port in (cluster.routers[0].http, cluster.routers[0].grpc):
            assert not await asyncio.to_thread(takes_tls_1_2, port, world)
        await until_routers_hear_each_other(cluster)
        await between_processes(world, cluster)
        await asyncio.to_thread(commands_come_in, world, cluster, monkeypatch, capfd)


def commands_come_in(
    world: World, cluster: ProcessCluster, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    token = world.folder / "token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    monkeypatch.setenv("TWOSTROKE_TOKEN_FILE", str(token))
    monkeypatch.setenv("TWOSTROKE_TLS_NAME", "localhost")
    trusted = ["--tls-ca", str(world.clients.file)]
    shown = [*trusted, "--tls-cert", str(world.client.cert), "--tls-key", str(world.client.key)]
    router = cluster.routers[0]
    few = ["--num-requests", "2", "--prompt-tokens", "20", "--output-tokens", "2", "--vocab-size", "2000"]
    for where in (["--url", f"https://{router.http}"], ["--grpc", router.grpc]):
        assert main(["bench", *where, *few, *shown]) == 0
        assert main(["bench", *where, *few, *trusted]) != 0
    for where in (["--url", f"https://{router.http}"], []):
        assert main(["doctor", *where, "--admin", cluster.admin, *shown]) in (0, 1)
        assert "reused" in capfd.readouterr().out, "it has come to a verdict"
    assert main(["bench", "--url", f"http://{router.http}", *shown]) == 2
    assert "must begin with https://" in capfd.readouterr().err


def takes_tls_1_2(address: str, world: World) -> bool:
    """Whether a client could come back with a session of TLS 1.2, and then show no certificate."""
    context = world.seen_by(world.client).context()
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with socket.create_connection(("127.0.0.1", port_of(address)), timeout=ANSWER_S) as sock:
        try:
            context.wrap_socket(sock, server_hostname="localhost").close()
        except OSError:
            return False
    return True


async def until_routers_hear_each_other(cluster: ProcessCluster) -> None:
    async with asyncio.timeout(ANSWER_S):
        while cluster.logs().count("router joins") < 2:
            await asyncio.sleep(0.1)


async def between_processes(world: World, cluster: ProcessCluster) -> None:
    address = str(cluster.workers["prefill-0"].info["address"])
    stranger = world.stranger.config(world.stranger.issue("intruder"))
    intruder = Membership.of(TOKEN, stranger)
    assert await told_by_worker(address, cluster.us) == "prefill-0"
    assert await told_by_worker(address, Membership("guess", cluster.us.certificates)) == "UNAUTHENTICATED"
    for membership in (TOKEN, intruder):
        assert await told_by_worker(address, membership) == "UNAVAILABLE"
        assert await told_by_worker(cluster.fleet_address, membership) == "UNAVAILABLE"

    misnamed = replace(world.seen_by(world.cluster.issue("odd", names=("x",)), world.cluster), name=CLUSTER_NAME)
    assert await told_by_worker(address, TOKEN, misnamed) == "UNAUTHENTICATED", "from our CA, not of our cluster"

    owner = cluster.workers["prefill-0"]
    assert cluster.us.certificates is not None
    assert intruder.certificates is not None
    ours, theirs = cluster.us.certificates.client, intruder.certificates.client
    theirs.load_verify_locations(str(world.cluster.file))  # it would believe the worker
    nameless = ssl.create_default_context(cafile=str(world.cluster.file))
    for context in (None, theirs, nameless, misnamed.context()):
        assert await asyncio.to_thread(page_port_says, owner, context, TOKEN) == b""
    assert b"Unauthenticated" in await asyncio.to_thread(page_port_says, owner, ours, "guess")
    assert b"welcome" in await asyncio.to_thread(page_port_says, owner, ours, TOKEN)


async def test_certificates_change_while_everybody_works(world: World) -> None:
    async with tls_cluster(world) as cluster:
        stop = asyncio.Event()
        outcomes: list[str] = []

        async def keep_asking(first_seed: int) -> None:
            seed = first_seed
            while not stop.is_set():
                outcomes.append(await asked_over_grpc(cluster, world.seen_by(world.client), seed))
                tls = world.seen_by(world.client)
                outcomes.append(await asyncio.to_thread(asked_over_http, cluster.routers[0].http, tls))
                seed += 1

        asking = [asyncio.create_task(keep_asking(1000 * number)) for number in range(2)]
        long = asyncio.create_task(long_answer(cluster, world))
        seen = {await asyncio.to_thread(serial_of, cluster.routers[0].grpc, world)}
        for _ in range(3):
            world.endpoint = world.clients.issue("endpoint", names=("localhost",))
            world.worker = world.cluster.issue("worker")
            earlier = set(seen)
            for address in (cluster.routers[0].grpc, cluster.routers[0].http):
                async with asyncio.timeout(ANSWER_S):
                    while (serial := await asyncio.to_thread(serial_of, address, world)) in earlier:
                        await asyncio.sleep(0.1)  # somebody shook hands when there was a new key and no certificate yet
                seen.add(serial)
        await cluster.restart("prefill-0")  # everybody connects to it with what is new
        before = len(outcomes)
        while len(outcomes) < before + 8 and not any(task.done() for task in asking):
            await asyncio.sleep(0.05)
        stop.set()
        await asyncio.gather(*asking)
        assert set(outcomes) == {"served", "HTTP/1.1 200 OK"}
        assert await long
        assert len(seen) == 4, "both doors showed each new certificate"


async def long_answer(cluster: ProcessCluster, world: World) -> bool:
    """One stream over one connection through all of it; whether it never had to go on elsewhere."""
    async with ResumingClient(http=[cluster.routers[0].http], tls=world.seen_by(world.client)) as client:
        body = {"prompt": list(prompt_of(100, seed=5)), "max_tokens": 300, "ignore_eos": True}
        chunks = [chunk async for chunk in client.stream("/v1/completions", body)]
        return client.resumptions == 0 and chunks[-1]["choices"][0]["finish_reason"] == "length"


def serial_of(address: str, world: World) -> str:
    host, _, port = address.rpartition(":")
    tls = world.seen_by(world.client)
    with (
        socket.create_connection((host, int(port)), timeout=ANSWER_S) as sock,
        tls.context().wrap_socket(sock, server_hostname="localhost") as encrypted,
    ):
        return str((encrypted.getpeercert() or {})["serialNumber"])
