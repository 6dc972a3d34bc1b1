"""What editors, agents and chat programs send is answered, by a real router and real workers."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import pytest
import pytest_asyncio

from tests.clients.recorded import RECORDED, Recorded
from tests.cluster.processes import ProcessCluster, running_cluster
from tests.hand_cut import messages_of
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
