"""Clients over a real network that go on at the other router when theirs dies or falls silent."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import grpc.aio

from router.addresses import Addresses
from tests.trials.chaos.faults.answer import Piece, Silence, Transcript
from tests.trials.chaos.faults.load import Ask, Conduct, Endpoint
from twostroke.rpc.v1 import inference_pb2, inference_pb2_grpc

GIVE_UP_S = 120.0
"""After which a stream has failed: far more than any fault takes."""
PAUSE_S = 0.1
"""Before another router is asked."""


def router_name(router: Addresses) -> str:
    """Returns the router's name in the journal of faults."""
    return f"router-{router.grpc.rpartition(':')[2]}"


class Broken(Exception):
    """A stream that ended before its answer did. Says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Clients:
    routers: Sequence[Addresses]
    model: str
    patience_s: float
    """For the next message of a router."""

    async def follow(
        self, ask: Ask, first: int, *, into: Transcript | None = None, leave: asyncio.Event | None = None
    ) -> Transcript:
        """The whole answer, from router `first` and, where need be, from the next ones; or until it is told to `leave`.

        `into` grows meanwhile, where it is given.
        """
        transcript = into or Transcript(ask.name, time.time())
        async with contextlib.AsyncExitStack() as behind:
            await self._follow(ask, first, transcript, leave or asyncio.Event(), behind)
        return transcript

    async def _follow(
        self, ask: Ask, first: int, transcript: Transcript, leave: asyncio.Event, behind: contextlib.AsyncExitStack
    ) -> None:
        """Whoever moves holds on to what is left `behind` until the next router has said something: one that hung up
        first would mostly find its answer ended, and nothing to attach to."""
        give_up_s = transcript.began_s + GIVE_UP_S
        at, token, wants_to_move = first, "", ask.conduct is Conduct.MOVES
        while transcript.failure is None:
            leave_at = ask.max_tokens // 3 if wants_to_move or ask.conduct is Conduct.LEAVES else None
            is_whole = transcript.usage is not None  # if its end alone is missing, nothing more is to be said
            pieces = self._pieces(ask, self.routers[at % len(self.routers)], token, is_whole)
            try:
                async for piece in pieces:
                    await behind.aclose()
                    transcript.take(piece, time.time())
                    token = piece.resume_token or token
                    if leave.is_set() or (leave_at is not None and transcript.tokens >= leave_at):
                        break
                else:
                    return
                behind.push_async_callback(pieces.aclose)
                if leave.is_set() or ask.conduct is Conduct.LEAVES:
                    transcript.has_left = True
                    return
                wants_to_move = False
                transcript.turns.append("it wanted to")
            except TimeoutError:
                transcript.silences.append(Silence(time.time(), router_name(self.routers[at % len(self.routers)])))
                transcript.turns.append(f"nothing for {self.patience_s:g} s")
            except Broken as error:
                transcript.turns.append(str(error))
                await asyncio.sleep(PAUSE_S)
            at += 1
            if time.time() > give_up_s:
                transcript.failure = f"no end after {GIVE_UP_S:g} s: {'; '.join(transcript.turns[-4:])}"

    async def _pieces(self, ask: Ask, router: Addresses, token: str, is_whole: bool) -> AsyncGenerator[Piece]:
        pieces = self._grpc(ask, router, token) if ask.endpoint is Endpoint.GRPC else self._http(ask, router, token)
        async with contextlib.aclosing(pieces):
            while True:
                async with asyncio.timeout(self.patience_s):
                    piece = await anext(pieces, None)
                if piece is None:
                    break
                is_whole = is_whole or piece.usage is not None
                yield piece
            if not is_whole:
                raise Broken("the stream ended without its last message")

    async def _grpc(self, ask: Ask, router: Addresses, token: str) -> AsyncGenerator[Piece]:
        async with grpc.aio.insecure_channel(router.grpc, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
            call = inference_pb2_grpc.InferenceStub(channel).Generate(
                _message(ask, self.model, token), timeout=ask.deadline_s or GIVE_UP_S
            )
            try:
                async for response in call:
                    yield Piece(
                        index=response.index,
                        text=response.text,
                        tokens=tuple(response.token_ids),
                        logprobs=tuple(entry.logprob for entry in (*response.prompt_logprobs, *response.logprobs)),
                        finish=response.finish_reason,
                        usage=(response.usage.prompt_tokens, response.usage.completion_tokens)
                        if response.HasField("usage")
                        else None,
                        resume_token=response.resume_token,
                    )
            except grpc.aio.AioRpcError as error:
                raise Broken(f"{error.code().name}: {error.details()}") from error
            finally:
                call.cancel()

    async def _http(self, ask: Ask, router: Addresses, token: str) -> AsyncGenerator[Piece]:
        headers = {"X-Resumable-Stream": "true", **({"Last-Event-ID": token} if token else {})}
        timeout = aiohttp.ClientTimeout(total=GIVE_UP_S, sock_connect=self.patience_s)
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout) as session,
                session.post(f"http://{router.http}{_path(ask)}", json=_body(ask, self.model), headers=headers) as got,
            ):
                if got.status != 200:
                    raise Broken(f"HTTP {got.status}: {(await got.text())[:200]}")
                event_id = ""
                async for line in got.content:
                    field, _, value = line.decode().rstrip("\r\n").partition(": ")
                    if not field and value:
                        yield Piece()  # a comment: somebody works on it
                    elif field == "id":
                        event_id = value
                    elif field == "data" and value != "[DONE]":
                        yield _piece(json.loads(value), event_id)
        except (aiohttp.ClientError, ConnectionError) as error:
            raise Broken(f"{type(error).__name__}: {error}") from error


def _message(ask: Ask, model: str, token: str) -> inference_pb2.GenerateRequest:
    sampling = inference_pb2.SamplingOptions(temperature=ask.temperature, seed=ask.seed)
    if ask.penalties:
        sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty = 0.3, 0.2, 1.1
    if ask.logprobs:
        sampling.logprobs = 1
    if ask.is_scored:
        sampling.prompt_logprobs = 0
    return inference_pb2.GenerateRequest(
        model=model,
        text=ask.prompt,
        sampling=sampling,
        stop=inference_pb2.StopOptions(stop=ask.stop, max_tokens=ask.max_tokens, ignore_eos=True),
        n=ask.n,
        resume_from=token,
    )


def _path(ask: Ask) -> str:
    return "/v1/chat/completions" if ask.is_chat else "/v1/completions"


def _body(ask: Ask, model: str) -> dict[str, Any]:
    prompt = {"messages": [{"role": "user", "content": ask.prompt}]} if ask.is_chat else {"prompt": ask.prompt}
    body: dict[str, Any] = {
        "model": model,
        **prompt,
        **ask.fields,
        "max_tokens": ask.max_tokens,
        "temperature": ask.temperature,
        "seed": ask.seed,
        "n": ask.n,
        "stop": list(ask.stop),
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    if ask.penalties:
        body |= {"presence_penalty": 0.3, "frequency_penalty": 0.2, "repetition_penalty": 1.1}
    if ask.logprobs:
        body |= {"logprobs": True, "top_logprobs": 1} if ask.is_chat else {"logprobs": 1}
    if ask.is_scored:
        body["echo"] = True
    return body


def _piece(chunk: dict[str, Any], event_id: str) -> Piece:
    if "error" in chunk:
        raise Broken(f"{chunk['error'].get('type')}: {chunk['error'].get('message')}")
    usage = chunk.get("usage")
    counts = None if usage is None else (usage["prompt_tokens"], usage["completion_tokens"])
    if not chunk["choices"]:
        return Piece(usage=counts, resume_token=event_id)
    choice = chunk["choices"][0]
    logprobs = choice.get("logprobs") or {}
    of_chat = tuple(entry["logprob"] for entry in logprobs.get("content") or ())
    return Piece(
        index=choice["index"],
        text=choice["text"] if "text" in choice else _said(choice["delta"]),
        tokens=tuple(choice.get("token_ids") or ()),
        logprobs=of_chat or tuple(each for each in logprobs.get("token_logprobs") or () if each is not None),
        finish=choice["finish_reason"] or "",
        usage=counts,
        resume_token=event_id,
    )


def _said(delta: dict[str, Any]) -> str:
    """All that a chunk of a chat adds: reasoning, content, and calls, without their ids: each stream has its own."""
    calls = [
        "".join((call["function"].get("name") or "", call["function"].get("arguments") or ""))
        for call in delta.get("tool_calls") or ()
    ]
    return "".join((delta.get("reasoning_content") or "", delta.get("content") or "", *calls))
