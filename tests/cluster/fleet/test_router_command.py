"""`twostroke router`: told everything by flags and a file, on its own beside a fleet that may not be there yet."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from cluster.flags.parser import USAGE_ERROR
from cluster.routers.process import is_ready
from tests.cluster.processes import PATIENCE_S, TOKEN, Client, running_cluster
from tools.cli import main
from twostroke.config import CacheConfig, ModelConfig

PACED = ModelConfig(model="paced:step_ms=10,max_model_len=2048")


@asynccontextmanager
async def router(tmp_path: Path, fleet: str, *flags: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, Path]]:
    (tmp_path / "token").touch(0o600)
    (tmp_path / "token").write_text(TOKEN + "\n")
    with (tmp_path / "log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "cluster.cli", "router", "--fleet", fleet, "--model", PACED.model),
            *("--http-port", "0", "--grpc-port", "0", *flags),
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
            env=os.environ | {"TWOSTROKE_TOKEN_FILE": str(tmp_path / "token")},
        )
    try:
        yield process, tmp_path / "log"
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def addresses(process: asyncio.subprocess.Process, log: Path) -> dict[str, str]:
    assert process.stdout is not None
    line = await asyncio.wait_for(process.stdout.readline(), PATIENCE_S)
    assert line, await asyncio.to_thread(log.read_text)
    told: dict[str, str] = json.loads(line)
    return told


def assert_light_and_discreet(pid: int) -> None:
    loaded = Path(f"/proc/{pid}/maps").read_text()
    assert "libtorch" not in loaded
    assert "_raylet" not in loaded
    for told in ("cmdline", "environ"):
        assert TOKEN.encode() not in Path(f"/proc/{pid}/{told}").read_bytes()


async def until(is_so: bool, admin: str) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while await is_ready(admin) != is_so:
            await asyncio.sleep(0.05)


async def test_it_waits_for_the_fleet_serves_and_drains_and_nobody_reads_the_token_from_outside(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    fleet = f"127.0.0.1:{port}"
    async with router(tmp_path, fleet, "--host", "0.0.0.0", "--grace", "60") as (process, log):
        at = await addresses(process, log)
        http = f"127.0.0.1:{at['http'].rpartition(':')[2]}"
        admin = at["admin"]
        assert not await is_ready(admin)
        assert_light_and_discreet(process.pid)

        cache = CacheConfig(kv_cache_memory_bytes=1 << 20)
        async with running_cluster(
            prefill=0, decode=1, model=PACED, cache=cache, routers=0, fleet_port=port
        ) as cluster:
            await until(True, admin)
            client = Client(f"127.0.0.1:{at['grpc'].rpartition(':')[2]}")
            stream = client.stream([1, 2, 3], max_tokens=150, ignore_eos=True)
            first = await anext(stream)
            process.send_signal(signal.SIGTERM)
            await until(False, admin)
            async with httpx.AsyncClient() as other:
                refused = await other.post(f"http://{http}/v1/completions", json={"model": PACED.model, "prompt": "x"})
            assert refused.status_code == 503
            rest = [token async for response in stream for token in response.token_ids]
            assert len(first.token_ids) + len(rest) == 150
            await client.close()
            assert await asyncio.wait_for(process.wait(), PATIENCE_S) == 0
            del cluster
        assert TOKEN not in await asyncio.to_thread(log.read_text)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--fleet", "nowhere"], "--fleet must be HOST:PORT of the Fleet service, got 'nowhere'"),
        (["--fleet", "host:99999"], "--fleet must be HOST:PORT"),
        (["--fleet", "h:1"], "--token-file (or $TWOSTROKE_TOKEN_FILE) is missing"),
        (["--fleet", "h:1", "--token-file", "/no/secret"], "--token-file /no/secret: No such file"),
        (
            ["--fleet", "h:1", "--token-file", "TOKEN", "--model", "no/such/model/"],
            "--model 'no/such/model/' is not a dir",
        ),
        (
            ["--fleet", "h:1", "--token-file", "TOKEN", "--model", "paced:", "--grace", "-1"],
            "--grace must be 0 or more",
        ),
        (["--fleet", "h:1", "--token-file", "TOKEN", "--model", "paced:", "--http-port", "-1"], "--http-port must be"),
        (["--fleet", "h:1", "--token-file", "TOKEN", "--model", "paced:", "--host", "203.0.113.1"], "203.0.113.1"),
        (
            ["--fleet", "h:1", "--token-file", "TOKEN", "--http-port", "7001", "--admin-port", "7001"],
            "--http-port and --admin-port are both 7001",
        ),
        (["--fleet", "h:1", "--token-file", "TOKEN", "--metrics-port", "70000"], "--metrics-port must be from 0 to"),
        (["--fleet", "h:1", "--token-file", "OPEN"], "OPEN may be read by every user of this host: chmod 600"),
        (["--fleet", "h:1", "--token-file", "TOKEN", "--tls-cert", "/c", "--tls-key", "/k"], "--tls-cert /c cannot be"),
    ],
)
def test_a_wrong_flag_is_one_line(
    flags: list[str], named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "token").touch(0o600)
    (tmp_path / "token").write_text(TOKEN)
    (tmp_path / "OPEN").write_text(TOKEN)
    (tmp_path / "OPEN").chmod(0o644)
    files = {"TOKEN": "token", "OPEN": "OPEN"}
    told = [str(tmp_path / files[flag]) if flag in files else flag for flag in flags]
    assert main(["router", *told]) == USAGE_ERROR
    said = capsys.readouterr().err.rstrip().splitlines()
    assert named in said[-1]
    assert "Traceback" not in "\n".join(said)
