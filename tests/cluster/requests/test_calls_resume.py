"""A real model's tool calls whose decode workers are killed in the middle of the arguments: clients see one call."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import jsonschema

from tests.cluster.processes import ProcessCluster, running_cluster
from tests.cluster.requests.deaths import asked_until, kill_the_busiest
from tests.cluster.requests.dialects import DIALECTS, Answer, Dialect, Dialogue
from tests.metrics_page import total
from twostroke.config import DEFAULT_MODEL, SPECULATE_OFF, CacheConfig, ModelConfig
from twostroke.config.output import OutputConfig
from twostroke.models.catalog.fetch import fetch

NOTE = {
    "type": "object",
    "properties": {"text": {"type": "string", "minLength": 150, "maxLength": 200}},
    "required": ["text"],
    "additionalProperties": False,
}
"""Takes some fifty tokens: long enough to be broken twice."""
TOOL = {"type": "function", "function": {"name": "take_note", "description": "Keeps a note.", "parameters": NOTE}}
QUESTION = "Take a note about the weather in Oslo."
PIECES = {"chat": '"arguments"', "responses": "function_call_arguments.delta", "messages": "input_json_delta"}
"""What each piece of arguments has in its event."""
INSIDE = 6
"""Pieces of arguments after which a stream is inside its call."""
DECODE = 3
"""Decode workers, of which two are killed."""


class CallStream:
    """One streamed answer that has to call the tool."""

    def __init__(self, dialect: Dialect, question: str) -> None:
        once: dict[str, Any] = {"tool_choice": "required", "parallel_tool_calls": False}
        if dialect.name == "messages":
            once = {"tool_choice": {"type": "any", "disable_parallel_tool_use": True}}
        self._dialect = dialect
        most = "max_output_tokens" if dialect.name == "responses" else "max_tokens"
        body = dialect.body(Dialogue("", question, [TOOL]))
        self._body = body | once | {"temperature": 0, most: 300, "stream": True, "speculation": SPECULATE_OFF}
        self._said = ""
        self.is_open = True

    async def read(self, http: httpx.AsyncClient) -> Answer:
        async with http.stream("POST", self._dialect.path, json=self._body) as got:
            assert got.status_code == 200, await got.aread()
            async for piece in got.aiter_text():
                self._said += piece
        self.is_open = False
        return self._dialect.streamed(self._said)

    @property
    def is_inside(self) -> bool:
        return self._said.count(PIECES[self._dialect.name]) >= INSIDE


class Asker:
    """Asks in every dialect at once."""

    def __init__(self, cluster: ProcessCluster) -> None:
        self._cluster = cluster
        self._streams: list[CallStream] = []

    async def ask(self) -> list[Answer]:
        self._streams = [CallStream(dialect, QUESTION) for dialect in DIALECTS]
        async with httpx.AsyncClient(base_url=self._cluster.http, timeout=120) as http:
            return await asyncio.gather(*(stream.read(http) for stream in self._streams))

    async def until_inside(self) -> None:
        """Waits until all streams have reached their calls, and one at least is still in it."""
        while not (
            all(stream.is_inside for stream in self._streams) and any(stream.is_open for stream in self._streams)
        ):
            await asyncio.sleep(0.01)


async def test_a_call_whose_decode_worker_dies_inside_its_arguments_goes_on_in_them() -> None:
    async with running_cluster(
        prefill=1,
        decode=DECODE,
        model=ModelConfig(dtype="bfloat16"),
        model_dir=fetch(DEFAULT_MODEL, "bfloat16", lambda stage, part: None),
        cache=CacheConfig(kv_cache_memory_bytes=64 << 20),
        output=OutputConfig(tool_call_parser="hermes"),
    ) as cluster:
        asker = Asker(cluster)
        expected = await asker.ask()
        for answer in expected:
            ((name, arguments),) = answer.says[1]
            assert name == "take_note"
            jsonschema.validate(arguments, NOTE)
        are_killed = asyncio.Event()
        asked = asyncio.ensure_future(asked_until(are_killed, asker.ask))
        living = {f"decode-{index}" for index in range(DECODE)}
        while len(living) > 1:
            await asker.until_inside()
            await kill_the_busiest(cluster, living, 1, asked)
        are_killed.set()
        rounds = await asked
        assert total(cluster.http, "twostroke_reopened_requests_total") >= 2
        for again in rounds:
            assert [answer.says for answer in again] == [answer.says for answer in expected]
