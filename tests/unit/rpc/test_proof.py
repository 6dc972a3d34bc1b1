"""Proofs of the cluster's token: what a thief of a port is shown, and what it can do with that."""

from __future__ import annotations

import asyncio
import contextlib
import tracemalloc
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import grpc.aio
import msgpack
import pytest

from twostroke.base.credentials import prove
from twostroke.base.errors import PeerLost, ServeError, Unauthenticated
from twostroke.rpc.channel import PeerChannel
from twostroke.rpc.proof import BEGIN, PROOF_KEY, TOKEN_KEY, CallVerifier, check_dialled, proving_channel
from twostroke.rpc.server import RpcServer
from twostroke.rpc.v1 import control_pb2, control_pb2_grpc

TOKEN = "the cluster's secret token"
PROMPT = "words of a client"
DRAIN = "/twostroke.v1.Control/Drain"
Answer = Callable[[bytes], bytes]


class Worker(control_pb2_grpc.ControlServicer):
    def __init__(self) -> None:
        self.seen: list[dict[str, str | bytes]] = []

    async def GetTrace(self, request, context):  # noqa: N802
        self.seen.append(dict(context.invocation_metadata()))
        return control_pb2.GetTraceResponse(stream=request.name)


@contextlib.asynccontextmanager
async def working(port: int = 0, token: str = TOKEN) -> AsyncIterator[tuple[RpcServer, Worker]]:
    server, worker = RpcServer("127.0.0.1", port, token=token), Worker()
    control_pb2_grpc.add_ControlServicer_to_server(worker, server.server)
    await server.start()
    try:
        yield server, worker
    finally:
        await server.stop(0)


class Thief(grpc.GenericRpcHandler):
    """Answers every call, and keeps what it was shown."""

    def __init__(self, answer: Answer = lambda request: request) -> None:
        self.methods: list[str] = []
        self.shown: list[bytes] = []
        self._answer = answer

    def service(self, handler_call_details: Any) -> Any:
        self.methods.append(handler_call_details.method)
        self.shown += [f"{key}={value}".encode() for key, value in handler_call_details.invocation_metadata]

        async def answer(request: bytes, context: Any) -> bytes:
            self.shown.append(request)
            return self._answer(request)

        return grpc.unary_unary_rpc_method_handler(answer)

    @property
    def all_shown(self) -> bytes:
        return b"\n".join(self.shown)


@contextlib.asynccontextmanager
async def listening(thief: grpc.GenericRpcHandler, address: str = "127.0.0.1:0") -> AsyncIterator[str]:
    server = grpc.aio.server(handlers=(thief,))
    port = server.add_insecure_port(address)
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


async def ask(channel: PeerChannel) -> str:
    """A call with words of a client in its message."""
    stub = control_pb2_grpc.ControlStub(channel.channel)
    return str((await channel.call(stub.GetTrace, control_pb2.GetTraceRequest(name=PROMPT), 5)).stream)


async def asked(address: str, token: str = TOKEN) -> str:
    channel = PeerChannel(address, token)
    try:
        return await ask(channel)
    finally:
        await channel.close()


@pytest.mark.parametrize("calls", [0, 1], ids=["before it has proved", "when it has proved"])
async def test_a_channel_that_was_closed_is_a_lost_peer(calls: int) -> None:
    async with working() as (server, _):
        channel = PeerChannel(server.address, TOKEN)
        for _ in range(calls):
            await ask(channel)
        await channel.close()
        with pytest.raises(PeerLost, match="the channel to it was closed: nothing was sent"):
            await ask(channel)


async def test_calls_between_processes_carry_a_proof_and_no_token() -> None:
    async with working() as (server, worker):
        channel = PeerChannel(server.address, TOKEN)
        assert [await ask(channel) for _ in range(3)] == [PROMPT] * 3
        assert await asyncio.gather(*(asked(server.address) for _ in range(4))) == [PROMPT] * 4
        await channel.close()
    assert all(PROOF_KEY in seen and TOKEN_KEY not in seen for seen in worker.seen)
    assert TOKEN not in str(worker.seen)
    assert len({seen[PROOF_KEY] for seen in worker.seen}) == 5, "each connection has proofs of its own"


LIARS: dict[str, Answer] = {
    "what it was sent": lambda request: request,
    "no list": lambda request: b"\x00",
    "a mark that it made up": lambda request: msgpack.packb([bytes(16), bytes(32)]),
    "the caller's own mark": lambda request: msgpack.packb([bytes(16), msgpack.unpackb(request)[2]]),
}


@pytest.mark.parametrize("answer", LIARS.values(), ids=LIARS)
async def test_a_listener_that_does_not_have_the_token_learns_neither_token_nor_message(answer: Answer) -> None:
    thief = Thief(answer)
    async with listening(thief) as address:
        with pytest.raises(PeerLost, match="did not prove that it has this cluster's token"):
            await asked(address)
        with pytest.raises(grpc.RpcError, match="did not prove"):
            await asyncio.to_thread(ask_blocking, address)
    assert thief.methods == [BEGIN, BEGIN]
    assert TOKEN.encode() not in thief.all_shown
    assert PROMPT.encode() not in thief.all_shown


def ask_blocking(address: str, token: str = TOKEN) -> str:
    """A call as commands make it."""
    with proving_channel(address, token) as channel:
        call = control_pb2_grpc.ControlStub(channel).GetTrace
        return str(call(control_pb2.GetTraceRequest(name=PROMPT), timeout=60).stream)


async def test_who_takes_the_port_of_a_dead_worker_is_sent_no_call_of_a_connection_that_was_proved() -> None:
    async with working() as (server, _):
        address = server.address
        channel = PeerChannel(address, TOKEN)
        assert await ask(channel) == PROMPT
    thief = Thief()
    try:
        async with listening(thief, address):
            for _ in range(3):
                with pytest.raises(PeerLost):
                    await ask(channel)
            assert set(thief.methods) == {BEGIN}
            assert PROMPT.encode() not in thief.all_shown
        async with working(int(address.rpartition(":")[2])):
            async with asyncio.timeout(60):
                while await outcome(channel) != PROMPT:
                    await asyncio.sleep(0.05)
    finally:
        await channel.close()


async def outcome(channel: PeerChannel) -> str:
    try:
        return await ask(channel)
    except ServeError as error:
        return type(error).__name__


async def test_a_begin_that_is_passed_on_to_another_worker_of_the_host_is_refused() -> None:
    async with working() as (server, worker), grpc.aio.insecure_channel(server.address) as other:

        class Relay(Thief):
            def service(self, handler_call_details: Any) -> Any:
                self.methods.append(handler_call_details.method)

                async def pass_on(request: bytes, context: Any) -> bytes:
                    try:
                        return bytes(await other.unary_unary(handler_call_details.method)(request, timeout=60))
                    except grpc.aio.AioRpcError as error:
                        await context.abort(error.code(), error.details() or "")

                return grpc.unary_unary_rpc_method_handler(pass_on)

        thief = Relay()
        async with listening(thief) as address:
            with pytest.raises(Unauthenticated, match="dial that one"):
                await asked(address)
    assert thief.methods == [BEGIN]
    assert not worker.seen


OWN = ["127.0.0.1:1", "0.0.0.0:2"]


def session(verifier: CallVerifier, token: str = TOKEN, port: int = 1) -> str:
    """Begins, and returns the proof for DRAIN."""
    nonce, address = bytes(range(16)), f"host:{port}"
    answer = verifier.begin(msgpack.packb([nonce, address, prove(token, "caller", nonce, address)]), OWN)
    theirs, mark = msgpack.unpackb(answer)
    assert mark == prove(TOKEN, "server", nonce, theirs, address)
    key = prove(TOKEN, "session", nonce, theirs).hex()
    return f"{nonce.hex()}.{prove(key, 'call', DRAIN).hex()}"


def test_a_proof_is_good_for_one_method_of_one_server() -> None:
    verifier = CallVerifier(TOKEN)
    proof = session(verifier)
    verifier.check([(PROOF_KEY, proof)], DRAIN)
    nonce, _, mark = proof.partition(".")
    wrong = [
        (verifier, proof, "/twostroke.v1.Decode/Open"),
        (CallVerifier(TOKEN), proof, DRAIN),
        (CallVerifier("another token"), proof, DRAIN),
        (verifier, f"{'0' * 32}.{mark}", DRAIN),
        (verifier, f"{nonce}.{'0' * 64}", DRAIN),
        (verifier, f"no nonce.{mark}", DRAIN),
        (verifier, "", DRAIN),
    ]
    for other, shown, method in wrong:
        with pytest.raises(Unauthenticated):
            other.check([(PROOF_KEY, shown)], method)
        with pytest.raises(Unauthenticated):
            other.check([(PROOF_KEY, shown), (TOKEN_KEY, "guess")], method)
    for metadata in (None, [], [(TOKEN_KEY, "")], [(TOKEN_KEY, "guess")], [(TOKEN_KEY, b"\xff")]):
        with pytest.raises(Unauthenticated):
            verifier.check(metadata, DRAIN)


def test_a_server_proves_itself_only_to_callers_that_have_the_token_and_dial_it() -> None:
    verifier = CallVerifier(TOKEN)
    with pytest.raises(Unauthenticated):
        session(verifier, token="guess")
    for port in (3, 12, ""):
        with pytest.raises(Unauthenticated, match=r"listens on 127\.0\.0\.1:1 and 0\.0\.0\.0:2"):
            session(verifier, port=port)  # type: ignore[arg-type]  # no port at all, too


async def test_a_caller_with_a_wrong_token_is_told_so() -> None:
    async with working() as (server, worker):
        for attempt in (asked(server.address, "guess"), asyncio.to_thread(ask_blocking, server.address, "guess")):
            with pytest.raises((Unauthenticated, grpc.RpcError), match="does not have this cluster's token"):
                await attempt
    assert not worker.seen


class Troubled(grpc.GenericRpcHandler):
    """A server that has the token, perhaps, and neither answers nor refuses by itself."""

    def __init__(self, code: grpc.StatusCode | None) -> None:
        self._code = code

    def service(self, handler_call_details: Any) -> Any:
        async def answer(request: bytes, context: Any) -> None:
            if self._code is not None:
                await context.abort(self._code, "busy")
            await asyncio.sleep(60)

        return grpc.unary_unary_rpc_method_handler(answer)


async def test_calls_that_wait_for_a_proof_end_in_their_own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twostroke.rpc.proof.BEGIN_S", 1.0)
    async with listening(Troubled(None)) as address:
        channel = PeerChannel(address, TOKEN)
        stub = control_pb2_grpc.ControlStub(channel.channel)

        async def ending(timeout_s: float) -> str:
            try:
                await channel.call(stub.GetTrace, control_pb2.GetTraceRequest(name=PROMPT), timeout_s)
            except ServeError as error:
                return type(error).__name__
            return "answered"

        async with asyncio.timeout(20):  # one after the other they take 26 s and more
            endings = await asyncio.gather(ending(30), *(ending(0.3) for _ in range(80)), ending(30))
        await channel.close()
    assert endings == ["PeerLost", *["DeadlineExceeded"] * 80, "PeerLost"]


@pytest.mark.parametrize("code", ["RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "CANCELLED"])
async def test_a_server_that_cannot_prove_itself_now_is_as_one_that_is_gone(code: str) -> None:
    async with listening(Troubled(grpc.StatusCode[code])) as address:
        with pytest.raises(PeerLost, match="nothing was sent"):
            await asked(address)


def test_what_strangers_show_is_not_remembered_at_length() -> None:
    verifier = CallVerifier(TOKEN)
    tracemalloc.start()
    for number in range(200):
        with pytest.raises(Unauthenticated):
            verifier.check([(PROOF_KEY, f"{number:016000x}.{'0' * 64}")], DRAIN)
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept < 1 << 20, "3.2 MB were shown"


@pytest.mark.parametrize(
    "dialled",
    ["10.0.0.5:7", "[fd00::5]:8", "worker-1.example:7", "127.0.0.1:7", "[::1]:8", "localhost:8", "10.0.0.9:9"],
)
def test_a_server_may_be_dialled_by_its_address_or_by_what_may_lead_to_it(dialled: str) -> None:
    check_dialled(dialled, ["10.0.0.5:7", "[fd00::5]:8", "0.0.0.0:9"])


@pytest.mark.parametrize("dialled", ["10.0.0.6:7", "[fd00::6]:8", "10.0.0.5:8", "worker-1.example:6", ""])
def test_a_begin_that_is_passed_on_to_a_worker_of_another_host_is_refused(dialled: str) -> None:
    """The workers of pods all have the same port."""
    with pytest.raises(Unauthenticated, match="dial that one"):
        check_dialled(dialled, ["10.0.0.5:7", "[fd00::5]:8"])
