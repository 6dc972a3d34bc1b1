"""The server that a chat talks to, over HTTP or gRPC. It streams answers and tells the recommended sampling."""

from __future__ import annotations

import abc
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, fields

import aiohttp
import grpc
import grpc.aio

from cluster.flags.client_credentials import ClientTls, authorization
from tools.clients.connect import connector, tls_endpoint
from tools.clients.resuming import ResumingClient, RouterPatience
from twostroke.models.catalog.recommended import Recommended
from twostroke.rpc.channel import PeerChannel
from twostroke.rpc.v1 import inference_pb2, inference_pb2_grpc

PATIENCE = RouterPatience(silence_s=300.0, begin_s=0.0)
"""A router may compute a long prompt. A question that no router takes is answered at once with the reason."""
INFO_S = 10.0
"""Seconds for the server to say what it serves."""

Message = dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Sampling by flags; None means what the model recommends, else the server's default."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None

    def given(self) -> dict[str, float]:
        return {each.name: getattr(self, each.name) for each in fields(self) if getattr(self, each.name) is not None}


@dataclass(frozen=True, slots=True)
class Served:
    """What a server serves; unknown where it does not say."""

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
        """Asks once what is served. A server that does not know the question keeps its own defaults."""
        if self._served is None:
            self._served = await self._ask_served()
        return self._served

    @abc.abstractmethod
    def answer(self, messages: Sequence[Message]) -> AsyncGenerator[str, None]:
        """Yields the pieces of an answer. Raises ServeError. Closing it early ends the answer at the server."""

    @abc.abstractmethod
    async def _ask_served(self) -> Served: ...

    async def _options(self) -> dict[str, float]:
        """Combines what the model recommends with the flags, which take precedence."""
        return {**((await self.served()).recommended or {}), **self._sampling.given()}


class HttpChatServer(ChatServer):
    async def answer(self, messages: Sequence[Message]) -> AsyncGenerator[str, None]:
        body = {"messages": list(messages), **await self._options()}
        async with ResumingClient(
            http=self._routers, patience=PATIENCE, api_key=self._api_key, tls=self._tls
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
                session.get(f"{scheme}://{self.address}/v1/models", headers=authorization(self._api_key)) as got,
            ):
                card = (await got.json())["data"][0]
                return Served(str(card["id"]), card.get("recommended_sampling"))
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError, KeyError, IndexError, TypeError):
            return Served()  # the first question meets the same error and reports it


class GrpcServer(ChatServer):
    async def answer(self, messages: Sequence[Message]) -> AsyncGenerator[str, None]:
        options = await self._options()
        max_tokens = options.pop("max_tokens", None)
        chat_messages = [inference_pb2.ChatMessage(role=each["role"], content=each["content"]) for each in messages]
        chat = inference_pb2.Chat(messages=chat_messages)
        request = inference_pb2.GenerateRequest(
            chat=chat,
            sampling=inference_pb2.SamplingOptions(**options),  # type: ignore[arg-type]  # whole numbers where it wants some
            stop=inference_pb2.StopOptions(max_tokens=None if max_tokens is None else int(max_tokens)),
        )
        async with ResumingClient(
            grpc=self._routers, patience=PATIENCE, api_key=self._api_key, tls=self._tls
        ) as client:
            async for response in client.generate(request):
                yield response.text

    async def _ask_served(self) -> Served:
        channel = PeerChannel(self.address, "", None if self._tls is None else tls_endpoint(self._tls))
        try:
            model = await inference_pb2_grpc.InferenceStub(channel.channel).GetModel(
                inference_pb2.GetModelRequest(), timeout=INFO_S, metadata=tuple(authorization(self._api_key).items())
            )
        except grpc.aio.AioRpcError:
            return Served()
        finally:
            await channel.close()
        told = model.recommended_sampling
        names = [each.name for each in fields(Recommended)]
        return Served(model.model, {name: getattr(told, name) for name in names if told.HasField(name)})
