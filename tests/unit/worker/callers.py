"""Those who call a worker: a router's end of its streams, a puller's end of its pages."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

import grpc.aio

from tests.unit.worker.rig import BLOCK, TOKEN, Running
from tests.unit.worker.token_batches import TokenBatches
from twostroke.base.errors import ServeError
from twostroke.base.ids import RequestId
from twostroke.kv_cache.block import block_hashes_of
from twostroke.request import Attempt, GenerateRequest, Grammar, SampledToken, SamplingParams
from twostroke.rpc.channel import PeerChannel, error_of
from twostroke.rpc.convert import attempt_to_message, hashes_to_bytes
from twostroke.rpc.peer import PeerPrefix
from twostroke.rpc.v1 import worker_pb2, worker_pb2_grpc
from twostroke.worker.host import ReadyInfo


@dataclass
class Received:
    """What a router has of one attempt, as it came."""

    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    entries: list[worker_pb2.TokenEntry] = field(default_factory=list)
    done: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def last(self) -> worker_pb2.TokenEntry:
        return self.entries[-1]


class Router:
    """A router's end of one decode worker: a token stream and what came over it."""

    def __init__(self, worker: ReadyInfo, router_id: str = "router-0", token: str = TOKEN) -> None:
        self.worker, self.router_id = worker, router_id
        self.batches: list[list[worker_pb2.TokenEntry]] = []
        self.received: dict[tuple[str, int], Received] = {}
        self.stream_ended = asyncio.Event()
        self._peer = PeerChannel(worker.address, token)
        self._stub = worker_pb2_grpc.DecodeStub(self._peer.channel)
        self._call: grpc.aio.UnaryStreamCall | None = None
        self._reader: asyncio.Task[None] | None = None

    async def connect(self) -> Router:
        """Begins a (new) token stream; returns when the worker has greeted it."""
        self.stream_ended = asyncio.Event()
        request = worker_pb2.TokensRequest(router_id=self.router_id)
        self._call = self._stub.Tokens(request, metadata=self._peer.metadata)
        assert not (await self._call.read()).entries
        self._reader = asyncio.create_task(self._read(self._call, self.stream_ended))
        return self

    async def disconnect(self) -> None:
        assert self._call is not None
        assert self._reader is not None
        self._call.cancel()
        await self._reader

    async def aclose(self) -> None:
        if self._reader is not None:
            await self.disconnect()
        await self._peer.close()

    async def _read(self, call: grpc.aio.UnaryStreamCall, ended: asyncio.Event) -> None:
        batches = TokenBatches()
        with contextlib.suppress(asyncio.CancelledError, grpc.aio.AioRpcError):
            while isinstance(batch := await call.read(), worker_pb2.TokenBatch):
                self.batches.append(batches.entries(batch))
                for entry in self.batches[-1]:
                    self._take(entry)
        ended.set()

    def _take(self, entry: worker_pb2.TokenEntry) -> None:
        got = self.of(entry.request_id, entry.attempt)
        got.entries.append(entry)
        got.tokens += [token.id for token in entry.tokens]
        got.positions += range(entry.position, entry.position + len(entry.tokens))
        if entry.finish_reason:
            got.done.set()

    def of(self, request_id: str = "r", attempt: int = 0) -> Received:
        return self.received.setdefault((request_id, attempt), Received())

    def message(
        self,
        prompt: Sequence[int],
        max_tokens: int = 8,
        *,
        request_id: str = "r",
        attempt: int = 0,
        source: Running | worker_pb2.PageSource | None = None,
        peer: PeerPrefix | None = None,
        source_forecast: worker_pb2.SourceForecast | None = None,
        emitted: Sequence[int] = (),
        deadline_s: float | None = None,
        seed: int = 1,
        grammar: Grammar | None = None,
        allowed_tokens: bytes = b"",
        **changes,
    ) -> worker_pb2.OpenRequest:
        sampling = SamplingParams(seed=seed, max_tokens=max_tokens, grammar=grammar, allowed_tokens=allowed_tokens)
        opened = Attempt(
            request=GenerateRequest(prompt=tuple(prompt), sampling=sampling, deadline_s=deadline_s),
            request_id=RequestId(request_id),
            number=attempt,
            emitted=tuple(SampledToken(token) for token in emitted),
            block_hashes=tuple(block_hashes_of([*prompt, *emitted], BLOCK)),
            router_id=self.router_id,
        )
        message = attempt_to_message(
            opened,
            fingerprint=self.worker.fingerprint,
            worker_epoch=self.worker.epoch,
            source=source.source if isinstance(source, Running) else source,
            peer=peer,
            source_forecast=source_forecast,
        )
        for name, value in changes.items():
            changed = message.request if name in GenerateRequest.__slots__ else message
            if isinstance(value, list):
                getattr(changed, name)[:] = value
            else:
                setattr(changed, name, value)
        return message

    async def open(self, prompt: Sequence[int], max_tokens: int = 8, **options) -> Received:
        """Raises the ServeError that the worker answered with."""
        return await self.send(self.message(prompt, max_tokens, **options))

    async def send(self, message: worker_pb2.OpenRequest) -> Received:
        await self._ask(self._stub.Open(message, metadata=self._peer.metadata))
        return self.of(message.request_id, message.attempt)

    async def close(self, request_id: str = "r", attempt: int = 0) -> None:
        request = worker_pb2.CloseRequest(request_id=request_id, attempt=attempt)
        await self._ask(self._stub.Close(request, metadata=self._peer.metadata))

    async def attach(self, request_id: str = "r", attempt: int = 0, *, from_position: int, **taking) -> None:
        """`taking`: new_attempt and deadline_s."""
        request = worker_pb2.AttachRequest(
            request_id=request_id, attempt=attempt, router_id=self.router_id, from_position=from_position, **taking
        )
        await self._ask(self._stub.Attach(request, metadata=self._peer.metadata))

    async def find(self, stream: str) -> list[worker_pb2.RequestSnapshot]:
        call = self._stub.Find(worker_pb2.FindRequest(stream=stream), metadata=self._peer.metadata)
        return list((await self._ask(call)).requests)

    async def answer(self, prompt: Sequence[int], max_tokens: int = 8, **options) -> Received:
        """Opens, and waits for the end."""
        got = await self.open(prompt, max_tokens, **options)
        async with asyncio.timeout(60):
            await got.done.wait()
        return got

    async def _ask(self, call):
        try:
            return await call
        except grpc.aio.AioRpcError as error:
            raise error_of(error, self.worker.address) from error


@contextlib.asynccontextmanager
async def router_to(running: Running, router_id: str = "router-0") -> AsyncIterator[Router]:
    """A connected router."""
    async with contextlib.aclosing(Router(running.info, router_id)) as router:
        yield await router.connect()


class Puller:
    """A bare client of Pages, for what a well-behaved worker never does."""

    def __init__(self, source: ReadyInfo, token: str = TOKEN) -> None:
        self._source = source
        self._peer = PeerChannel(source.address, token)

    def pull(
        self, tokens: Sequence[int], wanted: Sequence[int] | None = None, group: int = 0, **changes
    ) -> grpc.aio.UnaryStreamCall:
        hashes = block_hashes_of(tokens, BLOCK)
        blocks = range(len(hashes)) if wanted is None else wanted
        fields: dict = {
            "fingerprint": self._source.fingerprint,
            "source_epoch": self._source.epoch,
            "tokens": tokens,
            "block_hashes": hashes_to_bytes(hashes),
            "wanted": [worker_pb2.WantedPages(group=group, blocks=blocks)],
        }
        stub = worker_pb2_grpc.PagesStub(self._peer.channel)
        return stub.Pull(worker_pb2.PullRequest(**fields | changes), metadata=self._peer.metadata)

    async def pages(self, call: grpc.aio.UnaryStreamCall, count: int) -> list[worker_pb2.PagesReady]:
        """Messages until `count` pages are announced. Raises the ServeError that ended the pull."""
        messages: list[worker_pb2.PagesReady] = []
        try:
            async with asyncio.timeout(60):
                while sum(len(message.pages) for message in messages) < count:
                    response = await call.read()
                    assert response is not grpc.aio.EOF
                    if response.HasField("ready"):
                        messages.append(response.ready)
        except grpc.aio.AioRpcError as error:
            raise error_of(error, self._source.address) from error
        return messages

    async def refusal(self, call: grpc.aio.UnaryStreamCall) -> ServeError:
        """The ServeError that the source answers with."""
        try:
            async with asyncio.timeout(60):
                while await call.read() is not grpc.aio.EOF:
                    pass
        except grpc.aio.AioRpcError as error:
            return error_of(error, self._source.address)
        raise AssertionError("the pull ended without an error")

    async def aclose(self) -> None:
        await self._peer.close()


def with_epoch(source: worker_pb2.PageSource, epoch: str) -> worker_pb2.PageSource:
    return worker_pb2.PageSource(worker_id=source.worker_id, address=source.address, epoch=epoch)
