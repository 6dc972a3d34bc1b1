"""The client that is measured: it starts a short chat, a call and a question to `/live` at a steady pace.

Each is begun at its own time, whether those before it have ended or not, and measured from that time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import grpc
import grpc.aio

from tests.trials.chaos.neighbours.target import Play, Target
from tests.trials.chaos.neighbours.wire import channel, chat, dialled, head, http_client, post, shown, tls
from twostroke.rpc.v1 import inference_pb2

PACE_S = 0.1
PATIENCE_S = 20.0
TOKENS = 8
GENERATE = "/twostroke.v1.Inference/Generate"


@dataclass(slots=True)
class Seen:
    """Seconds that each question took, by its kind, and what went wrong."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)

    def merged(self, other: Seen) -> Seen:
        kinds = self.seconds.keys() | other.seconds.keys()
        together = {kind: self.seconds.get(kind, []) + other.seconds.get(kind, []) for kind in kinds}
        return Seen(together, self.errors + other.errors)


class Wrong(Exception):
    """An answer that is not what it must be."""


class Honest:
    """Asks for `seconds`; `target.key` is its own key."""

    def __init__(self, target: Target) -> None:
        self._play = Play(target, 1e9, seed=1)
        self._number = 0

    async def ask(self, seconds: float) -> Seen:
        seen = Seen({"http": [], "grpc": [], "live": []})
        kinds: dict[str, Callable[[], Awaitable[object]]] = {"http": self._chat, "grpc": self._call, "live": self._live}
        begun_s = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            for turn in range(int(seconds / PACE_S)):
                at_s = begun_s + turn * PACE_S
                await asyncio.sleep(max(0.0, at_s - time.monotonic()))
                for kind, ask in kinds.items():
                    tasks.create_task(self._measured(seen, kind, ask, at_s))
        return seen

    async def _measured(self, seen: Seen, kind: str, ask: Callable[[], Awaitable[object]], at_s: float) -> None:
        try:
            async with asyncio.timeout(PATIENCE_S):
                await ask()
        except (OSError, EOFError, ValueError, Wrong, grpc.RpcError, TimeoutError) as error:
            detail = error.details() if isinstance(error, grpc.aio.AioRpcError) else str(error)
            seen.errors.append(f"{kind}: {type(error).__name__} {detail}"[:300])
        seen.seconds[kind].append(time.monotonic() - at_s)

    async def _live(self) -> None:
        async with dialled(self._play.target.http, tls(self._play.target)) as (reader, writer):
            writer.write(head(self._play, "GET", "/live", {"Connection": "close"}) + b"\r\n")
            said = await reader.read()
            if not said.startswith(b"HTTP/1.1 200"):
                raise Wrong(said[:80].decode(errors="replace") or "the connection was closed")

    async def _chat(self) -> None:
        self._number += 1
        request = post(
            self._play,
            "/v1/chat/completions",
            chat(self._play, stream=True, max_tokens=TOKENS, ignore_eos=True),
            {"X-Request-Id": f"honest-{self._number}", "Connection": "close"},
        )
        async with http_client(self._play) as (reader, writer):
            writer.write(request)
            said = await reader.read()
        if not said.startswith(b"HTTP/1.1 200") or b"[DONE]" not in said:
            raise Wrong(said[:400].decode(errors="replace") or "the connection was closed")

    async def _call(self) -> None:
        self._number += 1
        asked = inference_pb2.GenerateRequest(
            text="Good morning",
            model=self._play.target.model,
            request_id=f"honest-grpc-{self._number}",
            stop=inference_pb2.StopOptions(max_tokens=TOKENS, ignore_eos=True),
        )
        async with channel(self._play) as own:
            method = own.unary_stream(GENERATE, response_deserializer=inference_pb2.GenerateResponse.FromString)
            call = method(asked.SerializeToString(), metadata=shown(self._play), timeout=PATIENCE_S)
            tokens = 0
            while (response := await call.read()) is not grpc.aio.EOF:
                tokens += len(response.token_ids)
        if tokens != TOKENS:
            raise Wrong(f"{tokens} tokens")
