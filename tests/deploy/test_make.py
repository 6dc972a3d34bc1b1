"""Every target of the Makefile works from any folder, or says at once why not."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.deploy.tools import ROOT
from tests.trials.chaos.pods.pod import Image, mounts_of

MAKEFILE = ROOT / "Makefile"
BY_ROOT = ("pods", "hosts", "rayup", "image")


def test_make_in_another_folder_says_where_it_works(tmp_path: Path) -> None:
    done = make("-f", str(MAKEFILE), "lint", cwd=tmp_path)
    assert done.returncode == 2
    assert "make -C THE_CHECKOUT lint" in done.stderr


@pytest.mark.parametrize("target", BY_ROOT)
def test_a_target_for_root_says_so_before_it_builds_anything(target: str, tmp_path: Path) -> None:
    (tmp_path / "id").write_text("#!/bin/sh\necho 1000\n")
    (tmp_path / "id").chmod(0o755)
    done = make("-C", str(ROOT), target, cwd=tmp_path, path=f"{tmp_path}:{os.environ['PATH']}")
    assert done.returncode == 2
    assert "needs root" in done.stderr
    assert "pip" not in done.stdout + done.stderr


def test_a_missing_program_is_named_with_its_package(tmp_path: Path) -> None:
    done = make("-C", str(ROOT), ".needs-no-such-program", cwd=tmp_path)
    assert done.returncode == 2
    assert "no-such-program is missing: get it with Debian's package no-such-program" in done.stderr


def test_recipes_stand_a_path_with_a_space(tmp_path: Path) -> None:
    checkout = tmp_path / "a checkout"
    (checkout / "proto" / "twostroke").mkdir(parents=True)
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, checkout / name)
    shutil.copytree(
        ROOT / "tests" / "trials" / "clients" / "requirements",
        checkout / "tests" / "trials" / "clients" / "requirements",
    )
    targets = re.findall(r"^([a-z][a-z-]*):(?!=)", MAKEFILE.read_text(), re.MULTILINE)
    assert len(targets) > 15
    for target in targets:
        done = make("-C", str(checkout), "-n", target, cwd=tmp_path)
        assert done.returncode == 0, f"{target}: {done.stderr}"
        broken = [word for line in said(done.stdout) for word in shlex.split(line) if word.endswith(f"{tmp_path}/a")]
        assert not broken, f"{target}: {broken}"


def test_a_volume_of_a_pod_does_not_hide_the_checkout_that_its_programs_lie_in() -> None:
    """Pods have a volume at /tmp, and a checkout below it is what `twostroke` is run out of."""
    checkout, python = Path("/tmp/somewhere/checkout"), Path("/usr")
    image = Image({}, {"/opt/twostroke/cache": Path("/root/.cache")}, (checkout, python))
    mounts = mounts_of(image, [("/v/ray", "/tmp/ray", "rw"), ("/v/tmp", "/tmp", "rw"), ("/v/token", "/etc/t", "ro")])
    targets = [path for _, path, _ in mounts]
    assert (str(checkout), str(checkout), "ro") in mounts
    assert str(python) not in targets
    assert targets.index("/tmp") < targets.index("/tmp/ray") < targets.index(str(checkout))


def make(*arguments: str, cwd: Path, path: str | None = None) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    environment |= {"PATH": path or os.environ["PATH"]}
    return subprocess.run(["make", *arguments], cwd=cwd, env=environment, capture_output=True, text=True, check=False)


def said(output: str) -> list[str]:
    """Its recipes' lines, without make's own."""
    lines = output.replace("\\\n", " ").splitlines()
    return [line for line in lines if not line.startswith(("make:", "make["))]
