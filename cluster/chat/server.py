"""The server that a chat is with, over HTTP or gRPC: it streams answers and knows the recommended sampling."""

from __future__ import annotations

import abc
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, fields

import aiohttp
import grpc
import grpc.aio

from cluster.clients.api_key import shown
from cluster.clients.http import connector
from cluster.clients.resuming import ResumingClient
from cluster.clients.tls import door_of
from cluster.flags.client_tls import ClientTls
from twostroke.models.recommended import Recommended
from twostroke.rpc.channel import PeerChannel
from twostroke.rpc.v1 import inference_pb2, inference_pb2_grpc

ANSWER_S = 300.0
"""Longest silence of the server."""
INFO_S = 10.0
"""For the server to say what it serves."""

Message = dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """None: as the model recommends, else as the server does by default."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None

    def said(self) -> dict[str, float]:
        return {each.name: getattr(self, each.name) for each in fields(self) if getattr(self, each.name) is not None}


@dataclass(frozen=True, slots=True)
class Served:
    """What a server says of itself; unknown where it does not say."""

    model: str = ""
    recommended: Mapping[str, float] | None = None


class ChatServer(abc.ABC):
    def __init__(self, routers: Sequence[str], sampling: Sampling, api_key: str, tls: ClientTls | None) -> None:
        self._routers = routers
        self._sampling = sampling
        self._api_key = api_key
        self._tls = tls
        self._served: Served | None = None

    @property
    def address(self) -> str:
        return self._routers[0]

    async def served(self) -> Served:
        """Asked once. Servers that do not know the question are served with their own defaults."""
        if self._served is None:
            self._served = await self._ask_served()
        return self._served

    @abc.abstractmethod
    def answer(self, messages: Sequence[Message]) -> AsyncGenerator[str, None]:
        """The pieces of an answer. Raises ServeError. Closed early, it ends the answer at the server, too."""

    @abc.abstractmethod
    async def _ask_served(self) -> Served: ...

    async def _options(self) -> dict[str, float]:
        """What was said by flags comes before what the model recommends."""
        return {**((await self.served()).recommended or {}), **self._sampling.said()}


class HttpServer(ChatServer):
    async def answer(self, messages: Sequence[Message]) -> AsyncGenerator[str, None]:
        body = {"messages": list(messages), **await self._options()}
        async with ResumingClient(
            http=self._routers, silence_s=ANSWER_S, begin_s=0, api_key=self._api_key, tls=self._tls
        ) as client:
            async for chunk in client.stream("/v1/chat/completions", body):
                for choice in chunk["choices"]:
                    yield choice["delta"].get("content") or ""

    async def _ask_served(self) -> Served:
        scheme = "http" if self._tls is None else "https"
        try:
            async with (
                aiohttp.ClientSession(
                    connector=connector(self._tls), timeout=aiohttp.ClientTimeout(total=INFO_S)
                ) as session,
                session.get(f"{scheme}://{self.address}/v1/models", headers=shown(self._api_key)) as got,
            ):
                card = (await got.json())["data"][0]
                return Served(str(card["id"]), card.get("recommended_sampling"))
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError, KeyError, IndexError, TypeError):
            return Served()  # the question that follows meets the same trouble and tells of it


class GrpcServer(ChatServer):
    async def answer(self, messages: Sequence[Message]) -> AsyncGenerator[str, None]:
        options = await self._options()
        max_tokens = options.pop("max_tokens", None)
        chat = inference_pb2.Chat(messages=[inference_pb2.ChatMessage(**message) for message in messages])
        request = inference_pb2.GenerateRequest(
            chat=chat,
            sampling=inference_pb2.SamplingOptions(**options),  # type: ignore[arg-type]  # whole numbers where it wants some
            stop=inference_pb2.StopOptions(max_tokens=None if max_tokens is None else int(max_tokens)),
        )
        async with ResumingClient(
            grpc=self._routers, silence_s=ANSWER_S, begin_s=0, api_key=self._api_key, tls=self._tls
        ) as client:
            async for response in client.generate(request):
                yield response.text

    async def _ask_served(self) -> Served:
        channel = PeerChannel(self.address, "", None if self._tls is None else door_of(self._tls))
        try:
            said = await inference_pb2_grpc.InferenceStub(channel.channel).GetModel(
                inference_pb2.GetModelRequest(), timeout=INFO_S, metadata=tuple(shown(self._api_key).items())
            )
        except grpc.aio.AioRpcError:
            return Served()
        finally:
            await channel.close()
        told = said.recommended_sampling
        names = [each.name for each in fields(Recommended)]
        return Served(said.model, {name: getattr(told, name) for name in names if told.HasField(name)})
