"""What editors, agents and chat programs send is answered, by a real router and real workers."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import pytest
import pytest_asyncio

from tests.cluster.processes import ProcessCluster, running_cluster
from tests.hand_cut import messages_of
from tests.trials.clients.recorded import RECORDED, Recorded
from tests.unit.router.dialects.anthropic.claude_code import CLAUDE_CODE, HEADERS
from tests.unit.router.dialects.anthropic.test_content_blocks import events_of, put_together
from twostroke.config import ModelConfig
from twostroke.config.output import OutputConfig

PACED = ModelConfig(model="paced:step_ms=1,max_model_len=6144,eos=1", served_model_name="tiny")
HERMES = OutputConfig(tool_call_parser="hermes")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster() -> AsyncIterator[ProcessCluster]:
    async with running_cluster(
        prefill=1, decode=1, model=PACED, output=OutputConfig(tool_call_parser="hermes")
    ) as started:
        yield started


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("recorded", RECORDED, ids=lambda each: each.client)
async def test_a_client_gets_an_answer(cluster: ProcessCluster, recorded: Recorded) -> None:
    async with httpx.AsyncClient(base_url=cluster.http, timeout=60) as client:
        (model,) = [card["id"] for card in (await client.get("/v1/models")).json()["data"]]
        got = await client.post(recorded.path, json={**recorded.body, "model": model})
    assert got.status_code == 200, got.text
    if not recorded.body.get("stream"):
        assert got.json()["choices"][0]["finish_reason"] in ("stop", "length", "tool_calls")
        return
    chunks = messages_of(got.content)
    assert got.text.endswith("data: [DONE]\n\n")
    ends = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"] if choice["finish_reason"]]
    assert len(ends) == 1
    if (recorded.body.get("stream_options") or {}).get("include_usage"):
        assert chunks[-1]["usage"]["completion_tokens"] > 0


@pytest.mark.asyncio(loop_scope="module")
async def test_claude_code_gets_an_answer_and_reuses_its_prefix(cluster: ProcessCluster) -> None:
    """The two requests differ in their billing headers, and in nothing else that the model sees."""
    usages = []
    async with httpx.AsyncClient(base_url=cluster.http, timeout=60) as client:
        for nonce, most in (("36ee5", CLAUDE_CODE["max_tokens"]), ("0aaa9", 8)):
            header = {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1.177; cch={nonce};"}
            system = [header, *CLAUDE_CODE["system"][1:]]
            asked = {**CLAUDE_CODE, "model": "tiny", "system": system, "max_tokens": most, "temperature": 0}
            counted = await client.post("/v1/messages/count_tokens", json=asked, headers=HEADERS)
            got = await client.post("/v1/messages?beta=true", json=asked, headers=HEADERS)
            assert got.status_code == 200, got.text
            events = events_of(got.text)
            kinds = [event["type"] for event in events]
            assert kinds[:3] == ["message_start", "ping", "content_block_start"]
            assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
            put_together(events)
            usages.append(events[-2]["usage"])
            parts = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
            assert sum(usages[-1][part] for part in parts) == counted.json()["input_tokens"]
    assert usages[0]["cache_read_input_tokens"] < 0.1 * counted.json()["input_tokens"]
    assert usages[1]["cache_read_input_tokens"] > 0.9 * counted.json()["input_tokens"]
