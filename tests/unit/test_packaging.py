"""What the environment and the generated code must be like for our import names to mean our code."""

from __future__ import annotations

import functools
import importlib.util
import shutil
import tomllib
from collections import defaultdict
from importlib.metadata import distributions
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


def our_packages() -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    return list(project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"])


@functools.cache
def owners() -> dict[str, set[str]]:
    """Which distributions install files under each import name."""
    found: dict[str, set[str]] = defaultdict(set)
    for distribution in distributions():
        for top in {file.parts[0].removesuffix(".py") for file in distribution.files or ()}:
            found[top].add(distribution.metadata["Name"])
    return found


@pytest.mark.parametrize("name", our_packages())
def test_no_other_installed_distribution_owns_our_import_name(name: str) -> None:
    assert owners().get(name, set()) <= {"twostroke"}


def test_the_owner_of_an_import_name_is_found() -> None:
    assert owners()["pytest"] == {"pytest"}


@pytest.mark.parametrize("name", our_packages())
def test_our_import_name_is_found_in_this_tree(name: str) -> None:
    found = importlib.util.find_spec(name)
    assert found is not None
    assert found.origin is not None
    assert Path(found.origin).is_relative_to(ROOT)


def test_proto_is_no_python_package_of_ours() -> None:
    assert not list((ROOT / "proto").rglob("__init__.py"))


def check_generated() -> ModuleType:
    loader = importlib.util.spec_from_file_location("check_generated", ROOT / "tests" / "check_generated.py")
    assert loader is not None
    assert loader.loader is not None
    module = importlib.util.module_from_spec(loader)
    loader.loader.exec_module(module)
    return module


def test_generated_code_that_is_out_of_date_missing_or_left_over_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder in ("proto", "twostroke/rpc/v1"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    generated = tmp_path / "twostroke/rpc/v1"
    assert check_generated().check(tmp_path) == 0

    with (generated / "fleet_pb2.py").open("a") as changed:
        changed.write("# edited\n")
    (generated / "worker_pb2_grpc.py").unlink()
    (generated / "gone_pb2.py").write_text("")
    assert check_generated().check(tmp_path) == 1
    said = capsys.readouterr().out
    assert "fleet_pb2.py: out of date" in said
    assert "worker_pb2_grpc.py: missing" in said
    assert "gone_pb2.py: no .proto makes it any more" in said
