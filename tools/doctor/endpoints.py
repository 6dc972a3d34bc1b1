"""The chat as clients send it: over gRPC, or over HTTP in OpenAI's form."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from dataclasses import replace
from typing import Any, Protocol

import grpc

from cluster.clients.admin_access import describe
from cluster.flags import client_credentials as credentials
from cluster.flags.client_credentials import ClientTls
from tools.doctor.facts import SentChat
from twostroke.base.errors import ConfigError, PeerLost
from twostroke.rpc.v1 import inference_pb2, inference_pb2_grpc

ANSWER_S = 120.0
ANSWER_TOKENS = 2


class ChatEndpoint(Protocol):
    def tokenize(self, text: str) -> tuple[int, ...]:
        """Returns the chat's prompt as the router makes it now."""

    def send(self, text: str, chat: SentChat) -> SentChat:
        """Returns `chat` with its result."""


class GrpcEndpoint:
    def __init__(self, channel: grpc.Channel, address: str) -> None:
        self._inference = inference_pb2_grpc.InferenceStub(channel)
        self._address = address

    def tokenize(self, text: str) -> tuple[int, ...]:
        try:
            answer = self._inference.Tokenize(
                inference_pb2.TokenizeRequest(chat=_chat(text)), timeout=ANSWER_S, metadata=_metadata()
            )
        except grpc.RpcError as error:
            raise PeerLost(f"{self._address}: {describe(error)}") from error
        return tuple(answer.token_ids)

    def send(self, text: str, chat: SentChat) -> SentChat:
        request = inference_pb2.GenerateRequest(
            chat=_chat(text),
            cache_salt=chat.salt or None,
            sampling=inference_pb2.SamplingOptions(temperature=0),
            stop=inference_pb2.StopOptions(max_tokens=ANSWER_TOKENS),
        )
        try:
            *_, last = self._inference.Generate(request, timeout=ANSWER_S, metadata=_metadata())
        except grpc.RpcError as error:
            return replace(chat, failure=describe(error))
        return replace(chat, prompt_tokens=last.usage.prompt_tokens, cached_tokens=last.usage.cached_tokens)


class HttpEndpoint:
    def __init__(self, url: str, tls: ClientTls | None = None) -> None:
        """`tls`: for https; None: the system's CAs."""
        self._context = None if tls is None else tls.context()
        self._url = url.rstrip("/").removesuffix("/v1")
        if not self._url.startswith(("http://", "https://")):
            raise ConfigError(f"--url must look like http://127.0.0.1:8000, got {url!r}", field="--url")
        if tls is not None and self._url.startswith("http://"):
            raise ConfigError(f"--url must begin with https:// where TLS is asked for, got {url!r}", field="--url")

    def tokenize(self, text: str) -> tuple[int, ...]:
        return tuple(self._post("/tokenize", {"messages": _messages(text)}, "tokens"))

    def send(self, text: str, chat: SentChat) -> SentChat:
        body = {"messages": _messages(text), "max_tokens": ANSWER_TOKENS, "temperature": 0}
        if chat.salt:
            body["cache_salt"] = chat.salt
        try:
            usage = self._post("/v1/chat/completions", body, "usage")
        except PeerLost as error:
            return replace(chat, failure=error.message)
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        return replace(chat, prompt_tokens=usage.get("prompt_tokens") or 0, cached_tokens=cached)

    def _post(self, path: str, body: dict[str, Any], wanted: str) -> Any:
        """Returns what the answer has under `wanted`."""
        headers = {"Content-Type": "application/json", **credentials.authorization(credentials.api_key())}
        request = urllib.request.Request(self._url + path, json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=ANSWER_S, context=self._context) as answer:
                told = json.loads(answer.read())
        except urllib.error.HTTPError as error:
            raise PeerLost(f"{self._url}{path}: {error.code}: {error.read().decode(errors='replace')}") from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise PeerLost(f"{self._url}{path}: {error}") from error
        if not isinstance(told, dict) or not told.get(wanted):
            raise PeerLost(f"{self._url}{path}: the answer has no {wanted}; is this a router of twostroke?")
        return told[wanted]


def _metadata() -> tuple[tuple[str, str], ...]:
    return tuple(credentials.authorization(credentials.api_key()).items())


def _chat(text: str) -> inference_pb2.Chat:
    messages = [inference_pb2.ChatMessage(role=each["role"], content=each["content"]) for each in _messages(text)]
    return inference_pb2.Chat(messages=messages)


def _messages(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]
