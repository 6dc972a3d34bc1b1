"""Bad values of the flags of page forms, tiers and pins, of every command that has them: one line that says what to do.

What only a worker can find out (its pages, its disk) is in `tests/cluster/cache/test_served_cache.py`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.launch import launcher, start_checks
from tools.cli import main

PACED = "paced:page_bytes=65536,max_model_len=4096"
SERVE = ["serve", "--model", PACED]
UP = ["up", "-f", "{folder}/cluster.yaml"]
SIMULATE = ["simulate", "--workload", "chat"]
COMPARE = ["bench", "compare", "http://127.0.0.1:1"]

FORMS = "choose from 'bfloat16', 'float16', 'float32', 'fp8_e4m3', 'fp8_e5m2', 'int8', 'int4'"
SIZES = "write bytes, or for example 512M, 2G, 2GiB, 2GB"

MISTAKES: dict[str, tuple[list[str], str]] = {
    # Forms of pages
    "no form": ([*SERVE, "--kv-format"], "--kv-format: expected one argument"),
    "half a form's name": ([*SERVE, "--decode-kv-format", "fp8"], FORMS),
    "forms that a paced model cannot convert": (
        [*SERVE, "--prefill-kv-format", "float16", "--decode-kv-format", "int8"], "give both the same"
    ),
    "one form alone, beside a paced model's": ([*SERVE, "--prefill-kv-format", "int8"], "give both the same"),
    "exact layers of another form": (
        [*SERVE, "--kv-exact-layers", "2", "--kv-format", "int8"],
        "--kv-exact-layers 2 is for --kv-format int4, and pages hold int8",
    ),
    "exact layers of no form": ([*SERVE, "--kv-exact-layers", "1"], "--kv-exact-layers 1 is for --kv-format int4"),
    "exact layers in a file": ([*UP, "cache: {kv_exact_layers: 1}"], "cache.kv_exact_layers 1 is for cache.kv_format"),
    # Host memory
    "no size": ([*SERVE, "--host-cache", "x"], f"--host-cache: not a size: 'x'; {SIZES}"),
    "an empty size": ([*SERVE, "--host-cache", ""], f"--host-cache: not a size: ''; {SIZES}"),
    "a size below 0": ([*SERVE, "--host-cache=-1G"], f"--host-cache: not a size: '-1G'; {SIZES}"),
    "a size in exponents": ([*SERVE, "--host-cache", "1e9"], f"--host-cache: not a size: '1e9'; {SIZES}"),
    "a size beyond all numbers": ([*SERVE, "--host-cache", "9" * 400], "--host-cache: a size must be less than 8 EiB"),
    "more host memory than there is": (
        [*SERVE, "--host-cache", "500T"], "--kv-cache-memory and --host-cache: 2 workers with"
    ),
    # Disk
    "no disk size": ([*SERVE, "--disk-cache", "much"], f"--disk-cache: not a size: 'much'; {SIZES}"),
    "an unknown unit": ([*SERVE, "--disk-cache", "1Q"], f"--disk-cache: not a size: '1Q'; {SIZES}"),
    "a disk beyond all numbers": ([*SERVE, "--disk-cache", "8E19T"], "--disk-cache: not a size: '8E19T'"),
    "a disk of 8 EiB": ([*SERVE, "--disk-cache", "8388608T"], "--disk-cache: a size must be less than 8 EiB"),
    "a folder that nothing is kept in": (
        [*SERVE, "--disk-cache-dir", "/tmp"], "--disk-cache-dir /tmp would be ignored: say with --disk-cache"
    ),
    "an empty folder name": (
        [*SERVE, "--disk-cache", "1G", "--disk-cache-dir", ""], "--disk-cache-dir is empty; name a path, or leave"
    ),
    "no rate": ([*SERVE, "--disk-write-mb-s", "fast"], "--disk-write-mb-s: invalid float value: 'fast'"),
    "a rate below 0": ([*SERVE, "--disk-write-mb-s=-3"], "--disk-write-mb-s must be positive and finite, got -3"),
    "a flag that is misspelt": ([*SERVE, "--disk-cach", "1G"], "did you mean --disk-cache or --disk-cache-dir?"),
    # Pins
    "more pins than pages": ([*SERVE, "--pin-cap", "2"], "--pin-cap must be from 0 to 0.9, got 2"),
    # The same in a cluster file
    "a form in a file": ([*UP, "cache: {kv_format: int2}"], "cluster.yaml:2: cache.kv_format must be one of"),
    "a size in a file": ([*UP, "cache: {host_cache: lots}"], "cluster.yaml:2: cache.host_cache: not a size"),
    "a list in a file": ([*UP, "cache: {disk_cache: [1]}"], "cluster.yaml:2: cache.disk_cache"),
    "a rate in a file": ([*UP, "cache: {disk_write_mb_s: 0}"], "cluster.yaml:2: cache.disk_write_mb_s"),
    "an unknown key in a file": ([*UP, "cache: {disk_cahce: 1}"], "did you mean cache.disk_cache"),
    "a number for a folder": ([*UP, "cache: {disk_cache_dir: 5}"], "cluster.yaml:2: cache.disk_cache_dir"),
    "a folder that is ignored": ([*UP, "cache: {disk_cache_dir: /tmp}"], "would be ignored"),
    # The simulator
    "a simulated size": ([*SIMULATE, "--host-cache", "x"], f"--host-cache: not a size: 'x'; {SIZES}"),
    "a simulated disk below 0": ([*SIMULATE, "--disk-cache=-1"], "--disk-cache: not a size: '-1'"),
    "a page's time of 0": (
        [*SIMULATE, "--host-cache", "1G", "--host-page-s", "0"], "--host-page-s must be positive and finite"
    ),
    "a page's time that is none": (
        [*SIMULATE, "--disk-cache", "1G", "--disk-page-s", "nan"], "--disk-page-s must be positive and finite"
    ),
    "a page's time without a tier": ([*SIMULATE, "--disk-page-s", "0.1"], "--disk-cache"),
    "a host page's time without a tier": ([*SIMULATE, "--host-page-s", "0.1"], "--host-cache"),
    # Loads of chats
    "chats without anything": ([*COMPARE, "--load", "chats:"], "--load 'chats:' is none of"),
    "chats without lanes": ([*COMPARE, "--load", "chats:4x3/1:64+32x16"], "is none of"),
    "no chats": ([*COMPARE, "--load", "chats:0x3/1:64+32x16@c2"], "c2: every number must be more than 0"),
    "no turns": ([*COMPARE, "--load", "chats:4x0/1:64+32x16@c2"], "--load chats:4x0/1:64+32x16@c2"),
    "no system prompts": ([*COMPARE, "--load", "chats:4x3/0:64+32x16@c2"], "--load chats:4x3/0:64+32x16@c2"),
    "a chat of one turn": ([*COMPARE, "--load", "chats:4x1/1:64+32x16@c2"], "has no later ones to measure"),
    "no lanes": ([*COMPARE, "--load", "chats:4x3/1:64+32x16@c0"], "--load chats:4x3/1:64+32x16@c0"),
    "chats below 0": ([*COMPARE, "--load", "chats:-4x3/1:64+32x16@c2"], "is none of"),
    "chats beyond all numbers": ([*COMPARE, "--load", f"chats:{'9' * 5000}x3/1:64+32x16@c2"], "at most 1,000,000"),
    "more turns than a plan has": ([*COMPARE, "--load", "chats:9999x9999/1:64+32x16@c2"], "are more than 1,000,000"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_answered_in_one_line_before_anything_is_started(
    mistake: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def checked(config, *_: object, **__: object) -> int:
        start_checks.check(config)
        start_checks.check_machine(config)
        raise AssertionError("it would have been started")

    monkeypatch.setattr(launcher, "_launch", checked)
    arguments, expected = MISTAKES[mistake]
    if arguments[0] == "up":
        (tmp_path / "cluster.yaml").write_text(f'model: {{model: "{PACED}"}}\n{arguments[-1]}\n')
        arguments = arguments[:-1]
    arguments = [each.replace("{folder}", str(tmp_path)) for each in arguments]
    try:
        status = main(arguments)
    except SystemExit as ended:
        status = ended.code
    printed = capsys.readouterr()
    assert expected in printed.err
    assert (status, printed.out) == (2, "")
    assert printed.err.count("\n") == 1, f"one line, got: {printed.err}"
    assert "Traceback" not in printed.err
    assert len(printed.err) < 900, "a line that is read"
