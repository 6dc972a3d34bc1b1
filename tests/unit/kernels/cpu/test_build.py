"""Compiling the native kernels: once, by whoever comes first, and never at the price of a run that hangs or fails."""

from __future__ import annotations

import ctypes
import fcntl
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from twostroke.base import cache_key as keys
from twostroke.base.errors import ConfigError
from twostroke.kernels.choice import choose_attention
from twostroke.kernels.cpu import build
from twostroke.kernels.cpu.attention import NativeAttention
from twostroke.kernels.cpu.build import load_kernels
from twostroke.kernels.cpu.variants import OVERRIDE, VARIANTS, chosen_variants
from twostroke.kernels.pools.page_pool import PagePool
from twostroke.kernels.torch_attention.gathered import TorchAttention


@pytest.fixture(autouse=True)
def small_sources(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """One small file instead of all kernels: what is built does not matter here."""
    folder = tmp_path_factory.mktemp("sources")
    (folder / "answer.h").write_text("#pragma once\n#define ANSWER 42\n")
    (folder / "answer.cpp").write_text(
        '#include "answer.h"\nextern "C" __attribute__((visibility("default"))) int answer() { return ANSWER; }\n'
    )
    monkeypatch.setattr(build, "SOURCES", folder)
    monkeypatch.delenv(OVERRIDE, raising=False)


def test_a_second_load_does_not_compile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_kernels(tmp_path) is not None
    built = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    monkeypatch.setenv("CXX", "false")
    assert load_kernels(tmp_path) is not None
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == built


def test_a_changed_header_is_compiled_again(tmp_path: Path) -> None:
    first, header = load_kernels(tmp_path), build.SOURCES / "answer.h"
    header.write_text(header.read_text().replace("42", "43"))
    second = load_kernels(tmp_path)
    assert first is not None
    assert second is not None
    assert [kernels.function("answer", (), ctypes.c_int)() for kernels in (first, second)] == [42, 43]


def test_a_library_has_another_name_for_other_options_of_the_compiler_sources_flags_or_builder(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def name() -> str:
        return f"{build._stem(VARIANTS[-1])}-{build.find_compiler().name}"

    found = [name()]
    for cxx in ("c++ -O1", "c++ -ffast-math", "c++ -DNDEBUG"):
        with monkeypatch.context() as patch:
            patch.setenv("CXX", cxx)
            found.append(name())
    for place, change in ((build, ("FLAGS", "-O2")), (keys, ("_source_digest", lambda program, code: b"repaired"))):
        with monkeypatch.context() as patch:
            patch.setattr(place, *change)
            found.append(name())
    (build.SOURCES / "answer.h").rename(build.SOURCES / "question.h")
    found.append(name())
    assert len({*found}) == len(found)
    assert name() == found[-1]


def test_processes_that_start_at_once_build_a_library_once_for_all(tmp_path: Path) -> None:
    log, kernels = tmp_path / "log", tmp_path / "kernels"
    compiler = script(tmp_path, f'echo "$@" >> {log}\nexec c++ "$@"\n')
    program = (
        "import sys; from pathlib import Path; from twostroke.kernels.cpu import build; "
        "build.SOURCES = Path(sys.argv[2]); sys.exit(build.load_kernels(Path(sys.argv[1])) is None)"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(build.__file__).parents[3]), "CXX": compiler}
    command = [sys.executable, "-c", program, str(kernels), str(build.SOURCES)]
    builders = [subprocess.Popen(command, env=environment) for _ in range(3)]
    assert [builder.wait() for builder in builders] == [0, 0, 0]
    assert len(list(kernels.glob("kernels-*.so"))) == 1
    assert log.read_text().count("-shared") == 1


PART = """
#include "answer.h"
struct Answers { int (*other)(); };
static int other() { return ANSWER + 1; }
extern "C" __attribute__((visibility("default"))) void twostroke_join(Answers *answers) { answers->other = other; }
"""
WITH_PART = """
struct Answers { int (*other)(); } answers;
#define SHOWN extern "C" __attribute__((visibility("default")))
SHOWN Answers *twostroke_parts() { return &answers; }
SHOWN int other() { return answers.other ? answers.other() : 0; }
"""


@pytest.fixture
def part(monkeypatch: pytest.MonkeyPatch) -> str:
    (build.SOURCES / "parts.cpp").write_text(WITH_PART)
    (build.SOURCES / "shared.cpp").write_text("")
    (build.SOURCES / "rare").mkdir()
    (build.SOURCES / "rare" / "rare.cpp").write_text(PART)
    monkeypatch.setattr(build, "SHARED", ("shared.cpp",))
    return "rare"


def test_a_part_is_built_when_it_is_needed_and_joins_what_is_loaded(tmp_path: Path, part: str) -> None:
    kernels = load_kernels(tmp_path)
    assert kernels is not None
    other = kernels.function("other", (), ctypes.c_int)
    assert other() == 0
    assert [path for path in tmp_path.glob("*.so") if part in path.name] == []
    kernels.need(part)
    assert other() == 43
    (library,) = (path for path in tmp_path.glob("*.so") if part in path.name)
    built_ns = library.stat().st_mtime_ns
    again = load_kernels(tmp_path)
    assert again is not None
    again.need(part)
    assert library.stat().st_mtime_ns == built_ns


def test_without_a_compiler_parts_come_from_where_all_were_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    build.build_all(tmp_path)
    monkeypatch.setenv("CXX", "no-such-compiler")
    kernels = load_kernels(tmp_path)
    assert kernels is not None
    kernels.need(part)
    assert kernels.function("other", (), ctypes.c_int)() == 43


@pytest.mark.parametrize("compiler", ["no-such-compiler", "c++ -DNDEBUG"])
def test_a_part_that_cannot_be_built_as_the_rest_was_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str, compiler: str
) -> None:
    kernels = load_kernels(tmp_path)
    assert kernels is not None
    monkeypatch.setenv("CXX", compiler)
    with pytest.raises(ConfigError, match=f"kernels_{part}-.* cannot be built"):
        kernels.need(part)


def test_who_waits_for_a_frozen_builder_builds_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "LOCKED_S", 0.3)
    with (tmp_path / build.LOCK).open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert load_kernels(tmp_path) is not None


def script(folder: Path, body: str) -> str:
    path = folder / "compiler"
    path.write_text("#!/bin/sh\n" + body)
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize("compiler", ["no-such-compiler", "false", "hangs"])
def test_without_a_working_compiler_torch_serves_and_one_warning_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, compiler: str
) -> None:
    if compiler == "hangs":
        monkeypatch.setattr(build, "COMPILE_TIMEOUT_S", 0.2)
        compiler = script(tmp_path, "sleep 60 & wait\n")
    monkeypatch.setenv("CXX", compiler)
    pool = PagePool.plain(torch.zeros(2, 1, 2, 1, 16, 8))
    with caplog.at_level(logging.WARNING):
        backend = choose_attention(
            pool, heads=1, rules=1.0, dtype=torch.float32, kernels=load_kernels(tmp_path / "kernels")
        )
    assert isinstance(backend, TorchAttention)
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_a_compiler_that_does_not_know_the_machine_builds_a_plain_library_and_a_warning_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    old = script(tmp_path, 'for a in "$@"; do case $a in -mavx*) exit 1;; esac; done\nexec c++ "$@"\n')
    monkeypatch.setenv("CXX", old)
    with caplog.at_level(logging.WARNING):
        kernels = load_kernels(tmp_path / "kernels")
    assert kernels is not None
    assert kernels.variant == "portable"
    best = chosen_variants()[0]
    assert len(caplog.records) == (best.name != "portable")
    assert best.name == "portable" or "slower native kernels than this CPU can run: variant=portable" in caplog.text


def test_a_library_that_cannot_be_loaded_is_built_again(tmp_path: Path) -> None:
    best = chosen_variants()[0]
    library = tmp_path / f"{build._stem(best)}-{build.find_compiler().name}.so"
    library.write_bytes(b"")
    kernels = load_kernels(tmp_path)
    assert kernels is not None
    assert kernels.library._name == str(library)


def test_machines_of_two_architectures_that_share_a_folder_never_load_each_others_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(OVERRIDE, "portable")
    assert load_kernels(tmp_path) is not None
    real = os.uname()
    monkeypatch.setattr(os, "uname", lambda: os.uname_result((*real[:4], "aarch64-of-the-test")))
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert load_kernels(tmp_path) is None
    monkeypatch.delenv("CXX")
    assert load_kernels(tmp_path) is not None
    assert len(list(tmp_path.glob("*.so"))) == 2


def test_what_a_killed_builder_left_is_removed_by_a_later_one(tmp_path: Path) -> None:
    abandoned, busy = tmp_path / ".build-abandoned", tmp_path / ".build-busy"
    for folder in (abandoned, busy):
        folder.mkdir()
        (folder / "answer.o").touch()
    os.utime(abandoned, (0, 0))
    assert load_kernels(tmp_path) is not None
    assert not abandoned.exists()
    assert busy.exists()


def test_the_variant_can_be_chosen_and_torch_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(OVERRIDE, "portable")
    kernels = load_kernels(tmp_path)
    assert kernels is not None
    assert kernels.variant == "portable"
    monkeypatch.setenv(OVERRIDE, "torch")
    assert load_kernels(tmp_path) is None


def test_a_pool_on_a_cpu_is_served_by_the_native_kernel(kernels: build.Kernels) -> None:
    pool = PagePool.plain(torch.zeros(2, 1, 2, 1, 16, 8, dtype=torch.bfloat16))
    assert isinstance(choose_attention(pool, heads=1, rules=1.0, dtype=torch.float32, kernels=kernels), NativeAttention)
