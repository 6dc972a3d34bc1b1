"""Bad input of every flag and file of `twostroke bill`: one clear line each, exit status 2, and no traceback."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.unit.engine.tiny import save_tiny
from tools.cli import main
from twostroke.observability.request_log import AnswerRecord, line_of

PACED = "paced:page_bytes=65536,max_model_len=4096"
ROW = {"timestamp": 0, "input_length": 512, "output_length": 5, "hash_ids": [1]}
ANSWER = AnswerRecord(
    request_id="a#0", arrival_s=1.0, outcome="stop", prompt_tokens=32, output_tokens=3, block_size=16, blocks="0" * 32,
    policy="kv", attempts=1,
)  # fmt: skip

BAD_FLAGS = [
    (["--model", "nowhere"], "--model 'nowhere' is not a directory here"),
    (["--model", ""], "--model must be the name of a model, got ''"),
    (["--model", "owner/model-that-is-not-here"], "is not on this machine; run: twostroke model pull"),
    (["--model", "/dev/null"], "--model"),
    (["--model", "missing.gguf"], "no such file"),
    (["--model", "paced:speed=3"], "unknown key 'speed'"),
    (["--model", "paced:page_bytes=1"], "page_bytes must be at least"),
    (["--weights", "int8", "--dtype", "float32"], "--weights int8 needs --dtype bfloat16"),
    (["--weights", "int8", "--device-memory", "8G"], "--weights int8 is for CPUs"),
    (["--tp", "2"], "--tp 2: a paced model computes nothing"),
    (["--kv-exact-layers", "2"], "--kv-exact-layers 2 is for --kv-format int4, and pages hold bfloat16"),
    (["--kv-cache-memory", "much"], "not a size"),
    (["--kv-cache-memory", "-1G"], "--kv-cache-memory"),
    (["--kv-cache-memory", "100K"], "at least 2 are needed: give 28672 bytes more"),
    (["--host-cache", "x"], "--host-cache"),
    (["--host-cache", "5000"], "--host-cache 5000 holds 0 pages of 65536 bytes; at least 1 are needed: give 60536"),
    (["--disk-cache", "70000"], "--disk-cache 70000 holds 1 pages of 69632 bytes; at least 2 are needed: give 69264"),
    (["--disk-cache", "1Q"], "--disk-cache"),
    (["--length", "-5"], "--length"),
    (["--length=-5"], "--length must be whole numbers"),
    (["--length", "0"], "--length must be whole numbers"),
    (["--length", "16,,32"], "--length must be whole numbers"),
    (["--length", "1e3"], "--length must be whole numbers"),
    (["--length", "4097"], "--length 4097 is more than the 4096 tokens"),
    (["--length", "9" * 5000], "--length must be whole numbers"),
    (["--shared=-1"], "--shared"),
    (["--max-model-len", "5000"], "--max-model-len 5000 is more than the 4096 tokens"),
    (["--limit", "0"], "--limit"),
    (["--answers", "some"], "--answers"),
    (["--bandwidth", "nan"], "--bandwidth"),
    (["--threads", "0"], "--threads"),
    (["--measure", "--device-memory", "8G"], "leave one of them away"),
    (["--disk-cache-dir", "/tmp"], "--disk-cache-dir would be ignored"),
    (["--measure", "--disk-cache-dir", "/nowhere/at/all"], "no such folder"),
    (["--measure", "--disk-cache-dir", "/proc"], "--disk-cache-dir /proc"),
    (["--log", "/nowhere"], "--log /nowhere: No such file"),
    (["--trace", "/"], "--trace /"),
    (["--log", "a", "--trace", "b"], "--log and --trace exclude each other"),
    (["--html", "/nowhere/bill.html"], "--html /nowhere/bill.html: the directory does not exist"),
    (["--json", "/"], "--json /: is a directory"),
    (["--draft-model", "small"], "a paced model computes nothing"),
    (["--draft-model", "small", "--device-memory", "8G"], "is computed on CPUs only: leave --device-memory away"),
    (["--draft-cache-memory", "some"], "not a size"),
    (["--draft-cache-memory", "1M"], "--draft-cache-memory would be ignored: it is for --draft-model"),
    (["--lenght", "5"], "did you mean --length?"),
]

BAD_LOGS = [
    (b"", "no rows"),
    (b"\n \n", "no rows"),
    (b"hello\n", ":1: neither a JSON object"),
    (b"{}\n", ":1: timestamp is missing"),
    (b"{\n", ":1: not valid JSON"),
    (b"[1]\n", ":1: a row must be an object"),
    (b"\xff\xfe\n", ":1: not UTF-8 text"),
    (json.dumps(ROW).encode() + b"\n{broken\n", ":2: not valid JSON"),
    (json.dumps(ROW | {"input_length": -1}).encode(), ":1: input_length must be a positive integer"),
    (json.dumps(ROW | {"hash_ids": []}).encode(), ":1: hash_ids must be 1 long"),
    (json.dumps(ROW | {"hash_ids": ["x"]}).encode(), ":1: hash_ids must be a list of integers"),
    (json.dumps(ROW | {"timestamp": float("nan")}).encode(), ":1: timestamp must be a number"),
    (b"TIMESTAMP,ContextTokens\n", ":1: neither a JSON object"),
    (b"TIMESTAMP,ContextTokens,GeneratedTokens\n", "no rows"),
    (b"TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,3,4\n", ":2: TIMESTAMP must be a date"),
    (line_of(ANSWER).encode() + b'{"record": "weather"}\n', ":2: record must be one of answer, worker"),
    (line_of(ANSWER).replace('"blocks":"0', '"blocks":"g').encode(), ":1: blocks must be 32 hex digits"),
    (
        line_of(ANSWER).replace('"prompt_tokens":32', '"prompt_tokens":-3').encode(),
        ":1: prompt_tokens must be a whole number from 1 to 100000000, got -3",
    ),
    (
        line_of(ANSWER).replace('"output_tokens":3', f'"output_tokens":{10**15}').encode(),
        ":1: output_tokens must be a whole number from 0 to 100000000, got 1000000000000000",
    ),
    (
        line_of(ANSWER).replace('"output_tokens":3', f'"output_tokens":{"9" * 4000}').encode(),
        ":1: output_tokens must be a whole number from 0 to 100000000, got 999",
    ),
    (
        line_of(ANSWER).replace('"cached_tokens":0', '"cached_tokens":33').encode(),
        ":1: cached_tokens must be a whole number from 0 to 32, got 33",
    ),
    (
        line_of(ANSWER).replace('"cached_tokens":0', '"cached_tokens":-1').encode(),
        ":1: cached_tokens must be a whole number from 0 to 32, got -1",
    ),
    (line_of(ANSWER).replace('"output_tokens":3', '"output_tokens":0').encode(), "no rows"),
    (
        line_of(ANSWER).replace('"block_size":16', '"block_size":8').replace("0" * 32, "0" * 64).encode(),
        "--block-size 16",
    ),
]

BAD_CONFIGS = [
    ("", "cannot be read"),
    ("{", "cannot be read"),
    ("[]", "cannot be read"),
    ("{}", "config"),
    ('{"model_type": "mamba"}', "is not supported"),
    ('{"model_type": "llama", "hidden_size": "wide"}', "config"),
    ('{"model_type": "llama", "num_attention_heads": 0}', "config"),
]


def refused(flags: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = main(["bill", *flags])
    except SystemExit as ended:
        status = int(str(ended.code))
    printed = capsys.readouterr()
    assert status == 2
    assert said in printed.err
    assert printed.err.strip().count("\n") == 0, f"one line, got: {printed.err}"
    assert "Traceback" not in printed.err


@pytest.mark.parametrize(("flags", "said"), BAD_FLAGS, ids=lambda value: " ".join(value)[:40])
def test_a_bad_flag_is_refused_in_one_line(flags: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    model = [] if "--model" in flags or "--weights" in flags else ["--model", PACED]
    refused([*model, *flags], said, capsys)


@pytest.mark.parametrize(("content", "said"), BAD_LOGS)
def test_a_bad_log_is_refused_by_its_line(
    content: bytes, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "requests.log"
    log.write_bytes(content)
    refused(["--model", PACED, "--log", str(log)], said, capsys)


@pytest.mark.parametrize("name", [b"<script>alert(1)<", b"\xff\xfe.log", b"[red]x[blue]"])
def test_a_log_may_have_any_name(name: bytes, tmp_path: Path) -> None:
    log, page = tmp_path / os.fsdecode(name), tmp_path / "bill.html"
    log.write_text(line_of(ANSWER))
    assert main(["bill", "--model", PACED, "--log", str(log), "--html", str(page)]) == 0
    assert "<script" not in page.read_text(encoding="utf-8")


@pytest.mark.parametrize(("config", "said"), BAD_CONFIGS)
def test_a_bad_config_is_refused_in_one_line(
    config: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(config, encoding="utf-8")
    refused(["--model", str(tmp_path)], said, capsys)


def test_a_damaged_gguf_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF" + bytes(50))
    refused(["--model", str(tmp_path / "model.gguf")], "not a GGUF file that can be read", capsys)


def test_a_directory_without_a_config_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    refused(["--model", str(tmp_path)], "has no config.json", capsys)


def test_a_form_that_leaves_no_two_pages_is_refused_and_others_are_billed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny = str(save_tiny(tmp_path / "tiny"))
    capsys.readouterr()  # what saving it printed
    refused(["--model", tiny, "--kv-cache-memory", "3000"], "--kv-cache-memory 3000 holds 1 pages", capsys)
    exact = ["--model", tiny, "--kv-format", "int4", "--kv-exact-layers", "1"]
    refused(exact, "--kv-exact-layers 1 leaves none of this model's 2 layers to int4: give at most 0", capsys)
    assert main(["bill", "--model", tiny, "--kv-cache-memory", "3000", "--kv-format", "int4"]) == 0
