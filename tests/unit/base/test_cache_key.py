"""A cache's key is another one whenever anything is that its content depends on."""

from __future__ import annotations

import ast
import functools
import shutil
from pathlib import Path

import pytest

from twostroke.base import cache_key as keys
from twostroke.base.cache_key import CACHES, PROGRAM, Maker, cache_key, content_digest

BEGINNINGS = {
    "pages": (
        "engine/build.py",
        "engine/backends/cpu/runner.py",
        "engine/backends/cuda/plan.py",
        "scheduler/scheduler.py",
    ),
    "packed weights": ("models/weights/packed_weights.py",),
    "spec": ("models/registry.py",),
    "checked model": ("models/checks/preflight.py",),
    "native kernels": ("kernels/cpu/build.py",),
    "kernel choice": ("kernels/cpu/choice.py",),
    "machine limits": ("kernels/limits.py",),
}
"""The modules that make what the program's own code makes; libraries do most of what is in the other caches."""

HARMLESS = (
    *("__init__.py", "base", "observability", "security", "config", "request.py", "tracing"),
    *("grammar", "speculation"),
)
"""Code that says nothing about what is computed: settings whose values are inputs of a key, errors, telemetry, and who
may have written a file. Grammars and drafts say which tokens come next, whose pages are computed by other code."""


@functools.cache
def imported(module: Path) -> frozenset[Path]:
    """Returns the modules of the program that a module imports, wherever it does."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    parts = [name.split(".")[1:] for name in names if name.split(".")[0] == PROGRAM.name]
    places = [PROGRAM.joinpath(*each) for each in parts]
    modules = {place.with_suffix(".py") if place != PROGRAM else PROGRAM / "__init__.py" for place in places}
    return frozenset(path for path in modules | {place / "__init__.py" for place in places} if path.is_file())


def lies_in(module: str, code: tuple[str, ...]) -> bool:
    return any(module == each or module.startswith(f"{each}/") for each in code)


@pytest.mark.parametrize("cache", BEGINNINGS)
def test_all_that_makes_a_content_is_in_its_key(cache: str) -> None:
    seen: set[Path] = set()
    ahead = [PROGRAM / each for each in BEGINNINGS[cache]]
    while ahead:
        module = ahead.pop()
        if module not in seen:
            seen.add(module)
            ahead += imported(module)
    code = (*CACHES[cache].code, *HARMLESS)
    forgotten = [name for path in seen if not lies_in(name := str(path.relative_to(PROGRAM)), code)]
    assert len(seen) > 1
    assert not forgotten


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the program's sources, whose keys are asked for."""
    copy = tmp_path / "program"
    shutil.copytree(PROGRAM, copy, ignore=shutil.ignore_patterns("__pycache__", "rpc"))
    monkeypatch.setattr(keys, "PROGRAM", copy)
    return copy


def test_each_cache_has_another_key_when_any_source_that_makes_its_content_is_edited(program: Path) -> None:
    before = {cache: cache_key(cache) for cache in CACHES}
    for cache, maker in CACHES.items():
        for code in maker.code:
            place = program / code
            edited = max(place.rglob("*.[hpc]*")) if place.is_dir() else place
            text = edited.read_bytes()
            edited.write_bytes(text + b"\n")
            keys._source_digest.cache_clear()
            assert cache_key(cache) != before[cache], f"{cache}: {code}"
            edited.write_bytes(text)
    keys._source_digest.cache_clear()
    assert {cache: cache_key(cache) for cache in CACHES} == before


@pytest.mark.parametrize(
    "name",
    ["worker/page_forms/converting_landing.py", "worker/tiers/copies/eviction_copies.py", "transfer/copy_threads.py"],
)
def test_pages_have_another_key_when_what_copies_or_converts_them_is_repaired(program: Path, name: str) -> None:
    """A page that was copied too late has other tokens' bytes on the disk, whatever computed it."""
    before = cache_key("pages")
    with (program / name).open("a") as source:
        source.write("\n")
    keys._source_digest.cache_clear()
    assert cache_key("pages") != before


@pytest.mark.parametrize("change", ["add", "rename", "remove"])
def test_a_source_that_is_added_renamed_or_removed_makes_another_key(program: Path, change: str) -> None:
    before = cache_key("pages")
    source = program / "kernels" / "cpu" / "native" / "linear.cpp"
    if change == "add":
        source.with_name("new.h").touch()
    elif change == "rename":
        source.rename(source.with_name("products.cpp"))
    else:
        source.unlink()
    keys._source_digest.cache_clear()
    assert cache_key("pages") != before


def test_a_library_of_another_version_makes_another_key_and_of_another_device_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = {}
    for release in ("2.9.0", "2.9.0+cpu", "2.9.1"):
        monkeypatch.setattr(keys, "version", lambda _, release=release: release)
        found[release] = {cache: cache_key(cache) for cache in CACHES}
    assert found["2.9.0"] == found["2.9.0+cpu"]
    for cache, maker in CACHES.items():
        assert (found["2.9.0"][cache] == found["2.9.1"][cache]) == (not maker.libraries), cache


def test_what_is_compiled_from_a_source_counts_and_what_python_leaves_beside_it_does_not(program: Path) -> None:
    before = cache_key("pages")
    (program / "kernels" / "__pycache__").mkdir(exist_ok=True)
    (program / "kernels" / "__pycache__" / "linear.cpython-312.pyc").write_bytes(b"compiled")
    keys._source_digest.cache_clear()
    assert cache_key("pages") == before


def test_inputs_of_other_names_values_or_types_make_other_keys() -> None:
    found = [
        cache_key("spec"),
        cache_key("checked model"),
        cache_key("spec", a=1),
        cache_key("spec", a=True),
        cache_key("spec", a="1"),
        cache_key("spec", a=b"1"),
        cache_key("spec", b=1),
        cache_key("spec", a=1, b=1),
        cache_key("spec", a=None),
    ]
    assert len({*found}) == len(found)
    assert cache_key("spec", a=1, b=2) == cache_key("spec", b=2, a=1)


def test_bytes_that_move_between_files_make_another_digest(tmp_path: Path) -> None:
    digests = set()
    for first, second in ((b"ab", b"c"), (b"a", b"bc"), (b"abc", b""), (b"abc", None)):
        (tmp_path / "1").write_bytes(first)
        (tmp_path / "2").unlink(missing_ok=True)
        if second is not None:
            (tmp_path / "2").write_bytes(second)
        digests.add(content_digest([("1", tmp_path / "1"), ("2", tmp_path / "2")]))
    assert len(digests) == 4


@pytest.mark.parametrize("code", ["no_such_folder", "no_such_file.py"])
def test_code_that_is_not_there_is_an_error(code: str) -> None:
    with pytest.raises(FileNotFoundError, match=code):
        Maker((code,)).digest()


def test_workers_on_other_processors_have_one_key(monkeypatch: pytest.MonkeyPatch) -> None:
    before = cache_key("pages")
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    monkeypatch.setenv("CXX", "another-compiler")
    keys._source_digest.cache_clear()
    assert cache_key("pages") == before
