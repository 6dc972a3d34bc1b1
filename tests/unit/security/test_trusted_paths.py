"""Caches that are executed or believed: each refuses what others may have written, or may replace."""

from __future__ import annotations

import ctypes
import grp
import json
import os
import pwd
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.lora import write_adapter
from twostroke.base.errors import ConfigError
from twostroke.kernels.cpu import build
from twostroke.kernels.kept import kept, kept_or_measured
from twostroke.models.adapters import store
from twostroke.models.catalog import fetch, places
from twostroke.models.catalog.places import cache_dir, hub_marker, locate
from twostroke.models.checks import preflight
from twostroke.models.file_versions import FileVersion
from twostroke.models.weights import digest, packed_file
from twostroke.security import trusted_paths
from twostroke.security.trusted_paths import UntrustedPath, check_cache, private_folder
from twostroke.transfer.base import SOCKETS
from twostroke.transfer.same_host.same_host_transport import listen_in

STRANGER = 4711


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("TWOSTROKE_CACHE", str(folder))
    return folder


def opened_to_others(path: Path) -> None:
    path.chmod(0o777 if path.is_dir() else 0o666)


def given_away(path: Path) -> None:
    os.lchown(path, STRANGER, STRANGER)


def replaced_by_a_link(path: Path) -> None:
    """It leads to the same, below a folder in which everybody can put another in its place."""
    elsewhere = path.parent / "elsewhere"
    elsewhere.mkdir()
    elsewhere.chmod(0o777)
    shutil.move(path, elsewhere / path.name)
    path.symlink_to(elsewhere / path.name)


AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
CHANGES = [opened_to_others, replaced_by_a_link, pytest.param(given_away, marks=AS_ROOT)]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("what", ["a", "a/b", "a/b/file"])
def test_a_file_is_trusted_if_no_other_user_can_write_it_or_anything_above_it(
    cache: Path, what: str, change: Callable[[Path], None]
) -> None:
    file = cache / "a" / "b" / "file"
    file.parent.mkdir(parents=True, mode=0o700)
    file.write_text("believed")
    check_cache(file)
    change(cache / what)
    with pytest.raises(UntrustedPath, match=r"others may write to it|belongs to user 4711"):
        check_cache(file)


def test_every_link_of_a_chain_is_looked_at(cache: Path) -> None:
    """Whoever can replace the second link of two chooses what is believed, wherever the last one leads."""
    (cache / "real").mkdir(mode=0o700)
    (cache / "real" / "file").write_text("believed")
    (cache / "open").mkdir()
    (cache / "open" / "second").symlink_to("../real")
    (cache / "first").symlink_to(cache / "open" / "second")
    check_cache(cache / "first" / "file")
    (cache / "open").chmod(0o777)
    check_cache(cache / "real" / "file")
    with pytest.raises(UntrustedPath, match="open: others may write to it"):
        check_cache(cache / "first" / "file")


def test_a_folder_of_all_users_with_a_sticky_bit_may_lie_above(cache: Path) -> None:
    cache.chmod(0o1777)
    folder = cache / "mine"
    folder.mkdir(mode=0o700)
    check_cache(folder)
    with pytest.raises(UntrustedPath):
        check_cache(cache)


def test_volumes_of_a_pod_are_open_to_its_group_and_their_mount_points_to_all(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = cache / "ours"
    folder.mkdir()
    cache.chmod(0o2777)
    folder.chmod(0o2775)
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path) == cache)
    for refused in (folder, cache):
        with pytest.raises(UntrustedPath):
            check_cache(refused)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.96.0.1")
    check_cache(folder)
    folder.chmod(0o2777)
    with pytest.raises(UntrustedPath):
        check_cache(folder)


def test_caches_are_made_so_that_they_are_believed_whatever_the_umask(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TWOSTROKE_CACHE", str(cache / "new"))
    monkeypatch.setattr(digest, "SETTLED_S", -1)
    monkeypatch.setattr(build, "SOURCES", cache)
    monkeypatch.setattr(fetch, "_run_python", lambda arguments, what: None)
    (cache / "none.cpp").write_text("int none;")
    model, adapter = cache / "model", write_adapter(cache / "adapter")
    model.mkdir()
    kernels, limits = cache_dir() / "kernels" / "x.so", cache_dir() / "limits.json"
    before = os.umask(0)
    try:
        twin = fetch._with_tokenizer_json(model, places.ready_dir(model), lambda stage, part: None)
        digest._remember(FileVersion.of(cache / "none.cpp"), "00")
        preflight._remember(cache_dir() / "checked" / "x", "")
        kept_or_measured(limits, "key", lambda: 1)
        build._compile(kernels, build.VARIANTS[-1], build.find_compiler())
        copy = store.store_dir() / store.take_in(adapter).digest.hex()
    finally:
        os.umask(before)
    for made in (twin, digest._memory_of(FileVersion.of(cache / "none.cpp")), cache_dir() / "checked" / "x"):
        check_cache(made)
    for made in (limits, kernels, copy):
        check_cache(made)


def test_a_group_of_this_user_alone_may_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """The umask is 002 where a distribution makes one for each user."""
    user = os.geteuid()
    names, belong = {4711: "ann", 4712: "staff"}, {4711: list[str](), 4712: ["ann"]}

    def passwd(uid: int) -> pwd.struct_passwd:
        return pwd.struct_passwd(("ann", "x", uid, 4711, "", "/home/ann", "/bin/sh"))

    def group(gid: int) -> grp.struct_group:
        return grp.struct_group((names[gid], "x", gid, belong[gid]))

    def problem(mode: int, gid: int) -> str | None:
        trusted_paths._is_private_group.cache_clear()
        return trusted_paths.problem_of(os.stat_result((stat.S_IFDIR | mode, 0, 0, 2, user, gid, 0, 0, 0, 0)))

    monkeypatch.setattr(pwd, "getpwuid", passwd)
    monkeypatch.setattr(grp, "getgrgid", group)
    assert problem(0o775, 4711) is None
    assert "others may write" in str(problem(0o777, 4711))
    monkeypatch.setattr(
        grp, "getgrgid", lambda gid: pytest.fail("a directory service may be slow: nobody asked for it")
    )
    assert problem(0o755, 4712) is None
    monkeypatch.setattr(grp, "getgrgid", group)
    assert "others may write" in str(problem(0o775, 4712)), "other users are in it"
    assert "others may write" in str(problem(0o775, 4713)), "nobody knows it"
    assert "others may write" in str(problem(0o775, 0))
    belong[4711] = ["ben"]
    assert "others may write" in str(problem(0o775, 4711))
    trusted_paths._is_private_group.cache_clear()


@pytest.mark.parametrize(
    ("ranges", "is_hidden"),
    [("1000 1000 1\n", True), ("0 0 4294967295\n", False), ("0 1000 1\n1 100000 65536\n", False)],
)
def test_owners_outside_of_a_user_namespace_are_told_from_its_own(tmp_path: Path, ranges: str, is_hidden: bool) -> None:
    """A container of a single user shows root's folders as those of `nobody`."""
    (tmp_path / "uid_map").write_text(ranges)
    status = os.stat_result((stat.S_IFDIR | 0o755, 0, 0, 2, 65534, 65534, 0, 0, 0, 0))
    assert trusted_paths._has_hidden_owner(status, tmp_path / "uid_map") is is_hidden
    assert not trusted_paths._has_hidden_owner(tmp_path.stat(), tmp_path / "uid_map")
    assert not trusted_paths._has_hidden_owner(status, tmp_path / "none")


@AS_ROOT
def test_a_folder_above_whose_owner_is_hidden_is_roots(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = cache / "file"
    file.touch(0o600)
    os.chown(cache, 65534, 65534)
    with pytest.raises(UntrustedPath):
        check_cache(file)
    monkeypatch.setattr(trusted_paths, "_has_hidden_owner", lambda status, _: status.st_uid == 65534)
    check_cache(file)
    cache.chmod(0o777)
    with pytest.raises(UntrustedPath):
        check_cache(file)
    os.chown(file, 65534, 65534)
    cache.chmod(0o755)
    with pytest.raises(UntrustedPath):
        check_cache(file)


def test_what_is_not_there_is_an_error_of_its_own(cache: Path) -> None:
    with pytest.raises(FileNotFoundError):
        check_cache(cache / "nothing")


def test_a_private_folder_is_this_users_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(trusted_paths, "MOST_RUNTIME_BYTES", 1000)
    folder = private_folder("test")
    assert folder == private_folder("test") == tmp_path / "twostroke-test"
    folder.chmod(0o750)
    with pytest.raises(UntrustedPath, match="this user alone"):
        private_folder("test")
    folder.rmdir()
    folder.symlink_to(tmp_path)
    with pytest.raises(UntrustedPath):
        private_folder("test")


def test_a_runtime_folder_that_cannot_be_written_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(trusted_paths, "MOST_RUNTIME_BYTES", 1000)
    monkeypatch.setattr(os, "access", lambda path, how: Path(path) != tmp_path)  # as on a volume that is read-only
    assert not private_folder("pages").is_relative_to(tmp_path)


def test_a_long_runtime_folder_is_not_used_for_sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = tmp_path / ("long" * 20)
    runtime.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    path, listening = listen_in(private_folder(SOCKETS), 1)
    listening.close()
    path.unlink()
    assert not list(runtime.iterdir())


def test_no_kernel_is_loaded_from_a_folder_that_others_can_write_to(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[str] = []
    monkeypatch.setattr(ctypes, "CDLL", loaded.append)
    variant = build.VARIANTS[0]
    monkeypatch.setattr(build, "find_compiler", lambda: build.Compiler(("c++",), "gcc-1"))
    library = cache / f"{build._stem(variant)}-gcc-1.so"
    library.write_bytes(b"code")
    build.load_variant(cache, variant)
    assert loaded == [str(library)] * 2
    loaded.clear()
    opened_to_others(cache)
    with pytest.raises(UntrustedPath):
        build.load_variant(cache, variant)
    monkeypatch.setattr(build, "find_compiler", fails)
    with pytest.raises(UntrustedPath):
        build.load_variant(cache, variant)
    assert not loaded


def fails() -> None:
    raise OSError("no compiler")


def test_no_packed_weights_are_mapped_from_below_a_folder_that_others_can_write_to(cache: Path) -> None:
    opened_to_others(cache)
    wrote: list[object] = []
    assert packed_file.mapped(cache / "packed" / "x.packed", wrote.append) is None
    assert not wrote


def test_measurements_that_others_may_have_written_are_not_believed(cache: Path) -> None:
    path = cache / "measured" / "limits"
    assert kept_or_measured(path, "key", lambda: 1) == 1
    assert kept(path, "key") == 1
    opened_to_others(path.parent)
    assert kept(path, "key") is None
    with pytest.raises(OSError, match="others may write"):
        kept_or_measured(path, "key", lambda: 2)


def test_digests_that_others_may_have_written_are_not_believed(cache: Path) -> None:
    weights = cache / "weights"
    weights.write_bytes(b"weights")
    version = FileVersion.of(weights)
    memory = digest._memory_of(version)
    memory.parent.mkdir(parents=True, mode=0o700)
    memory.write_text(json.dumps({**digest.asdict(version), "digest": "forged"}))
    assert digest._remembered(version) == "forged"
    opened_to_others(memory.parent)
    assert digest._remembered(version) is None


def test_models_in_the_cache_that_others_may_have_written_are_refused_by_name(cache: Path) -> None:
    marker = hub_marker("owner/name")
    marker.parent.mkdir(parents=True, mode=0o700)
    made = cache / "models" / "made"
    made.mkdir(mode=0o700)
    (made / "tokenizer.json").write_text("{}")
    marker.write_text(str(made))
    assert locate("owner/name", "float32") == made
    for folder in (made, marker.parent):
        folder.chmod(0o777)
        with pytest.raises(ConfigError, match=r"not trusted.*others may write to it"):
            locate("owner/name", "float32")
        folder.chmod(0o700)


def test_a_copy_of_an_adapter_that_others_may_have_written_counts_for_none(cache: Path) -> None:
    place = store.store_dir() / "00"
    place.mkdir(parents=True, mode=0o700)
    opened_to_others(place)
    with pytest.raises(ConfigError, match="others may write"):
        store._check_copy(place)


def test_every_reader_of_the_cache_asks_the_one_check() -> None:
    """A new cache is found here: whoever names the cache's folder also names the check, or is known to only write."""
    source = Path(trusted_paths.__file__).parent.parent
    users = {path for path in source.rglob("*.py") if "cache_dir()" in path.read_text(encoding="utf-8")}
    asks = {
        path for path in users if any(word in path.read_text(encoding="utf-8") for word in ("check_cache", "trust"))
    }
    passes_on = {
        "engine/ranks/cuda.py",  # kernels/cpu/build.py asks
        "engine/ranks/cpu.py",
        "engine/backends/cpu/runner.py",
        "engine/backends/cpu/backend.py",
        "worker/tiers/opening.py",  # kv_cache/tiers/folders.py asks
        "worker/measured/machine_limits.py",  # kernels/kept.py asks
        "models/weights/packed_weights.py",  # models/weights/packed_file.py asks
    }
    assert {str(path.relative_to(source)) for path in users - asks} <= passes_on
