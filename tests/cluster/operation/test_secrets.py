"""No secret is where others can read it: processes as users run them, with a token and keys, and all that they show."""

from __future__ import annotations

import asyncio
import json
import os
import urllib.request
from pathlib import Path

import grpc
import grpc.aio
import pytest
import yaml

from router.auth.api_keys import draw_key
from tests.cluster.processes import SHOWN, TOKEN, ProcessCluster, generate_request, running_cluster
from tests.metrics_page import scraped
from tests.process_table import below, title_of
from tests.unit.worker.rig import paced
from twostroke.config import EndpointsConfig, Role, RouterConfig, WorkerConfig
from twostroke.rpc.v1 import control_pb2, control_pb2_grpc
from twostroke.rpc.v1.inference_pb2_grpc import InferenceStub

PROMPT = "a word that nobody may read"


def completed(cluster: ProcessCluster, key: str) -> int:
    """Tokens of an answer over HTTP."""
    body, shown = {"prompt": PROMPT, "max_tokens": 2}, {"authorization": f"Bearer {key}"}
    asked = urllib.request.Request(
        f"{cluster.http}/v1/completions", json.dumps(body).encode(), {**shown, "content-type": "application/json"}
    )
    with urllib.request.urlopen(asked) as answer:
        return int(json.load(answer)["usage"]["completion_tokens"])


def shown_by(cluster: ProcessCluster) -> str:
    """Arguments, logs, metrics, and what routers say of themselves."""
    arguments = list(map(title_of, below(os.getpid())))
    assert sum("-m router" in line or "_worker" in line for line in arguments) >= 3
    pages = [
        cluster.routers[0].addresses.metrics,
        *(str(each.info["metrics_address"]) for each in cluster.workers.values()),
    ]
    metrics = [scraped(page) for page in pages]
    with grpc.insecure_channel(cluster.admin) as channel:
        control = control_pb2_grpc.ControlStub(channel)
        said = control.GetServerInfo(control_pb2.GetServerInfoRequest(), metadata=SHOWN)
    return "\n".join([*arguments, cluster.logs(), *metrics, str(said)])


async def test_neither_tokens_nor_keys_nor_prompts_are_in_arguments_logs_or_metrics(
    tmp_path: Path,
) -> None:
    good, revoked = draw_key(), draw_key()
    entries = {
        good.id: {"tenant": "acme", "sha256": good.sha256},
        revoked.id: {"tenant": "acme", "sha256": revoked.sha256, "disabled": True},
    }
    file = tmp_path / "keys.yaml"
    file.write_text(yaml.safe_dump({"keys": entries}))
    endpoints = EndpointsConfig(api_keys=str(file))
    async with running_cluster(
        prefill=1, decode=1, model=paced(step_ms=1), endpoints=endpoints, is_plain=True
    ) as cluster:
        metadata = (("authorization", f"Bearer {good.key}"),)
        async with grpc.aio.insecure_channel(cluster.grpc) as channel:
            request = generate_request([7] * 40, max_tokens=3)
            messages = [each async for each in InferenceStub(channel).Generate(request, metadata=metadata)]
            assert messages[-1].usage.completion_tokens == 3
            refused = InferenceStub(channel).Generate(request, metadata=(("authorization", f"Bearer {revoked.key}"),))
            with pytest.raises(grpc.aio.AioRpcError, match="revoked"):
                await refused.read()
        assert await asyncio.to_thread(completed, cluster, good.key) == 2
        shown = await asyncio.to_thread(shown_by, cluster)
        for secret in (TOKEN, good.key, revoked.key, good.sha256, PROMPT):
            assert secret not in shown


def test_configs_do_not_show_the_token() -> None:
    worker = WorkerConfig(role=Role.DECODE, worker_id="d", cluster_token=TOKEN)
    assert TOKEN not in f"{RouterConfig(cluster_token=TOKEN)!r} {worker!r}"
