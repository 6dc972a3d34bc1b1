"""The image: its Dockerfile fits the tree, and (`make image`) it is built and does what it is for."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cluster import ports
from tests.deploy import image
from tests.deploy.image import DOCKERFILE, Buildah, Container
from tests.deploy.tools import ROOT, tool

PATIENCE_S = 300.0


def test_the_dockerfile_has_no_complaint_of_hadolint() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([hadolint, "--no-color", DOCKERFILE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_what_the_dockerfile_copies_is_there_and_not_ignored_and_all_packages_are_copied() -> None:
    instructions = re.sub(r"\\\n", " ", DOCKERFILE.read_text()).splitlines()
    copies = [line.split()[1:] for line in instructions if line.startswith("COPY ") and "--from" not in line]
    sources = [source for words in copies for source in words[:-1]]
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    let_through = [line.removeprefix("!") for line in ignored if line.startswith("!")]
    assert ignored[1] == "*"
    for source in sources:
        assert (ROOT / source).exists(), source
        assert source in let_through, source
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert set(packages) <= set(sources)
    extras = set(re.findall(r"extras=([a-z,]+)", DOCKERFILE.read_text())[0].split(","))
    assert extras <= set(project["project"]["optional-dependencies"])


def test_the_image_takes_the_same_torch_as_the_makefile() -> None:
    (by_make,) = re.findall(r"^TORCH\s*:=\s*(\S+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert re.findall(r"^ARG TORCH=(\S+)", DOCKERFILE.read_text(), re.MULTILINE) == [by_make] == [image.TORCH]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_image_is_built_and_serves_as_a_user_without_rights_and_without_a_compiler(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("NOT CHECKED: buildah's chroot isolation needs root")
    if shutil.which("debootstrap") is None and not (image.HOME / "base").exists():
        pytest.skip("NOT CHECKED: debootstrap is missing; get it with Debian's package debootstrap")
    buildah = Buildah(tool("buildah"))
    image.build(buildah)
    assert image.settings(buildah) == {"user": "1000:1000", "entry_point": "[twostroke]", "command": "[--help]"}
    with buildah.container() as container:
        assert "Serve a language model" in container.run("twostroke", "--help").stdout
        assert container.run("id", "-u").stdout.strip() == "1000"
        assert container.run("bash", "-c", "ray --version && ray job --help").returncode == 0
        assert container.run("touch", "/opt/twostroke/x").returncode != 0
        assert_kernels_are_there(container)
        assert_a_router_runs(container, tmp_path / "router.log")
        assert_it_serves(container, tmp_path / "serve.log")


def assert_kernels_are_there(container: Container) -> None:
    """Reads-only: a build that is missing could not be made up for."""
    script = (
        "from twostroke.kernels.cpu.build import load_kernels; from pathlib import Path; "
        "from twostroke.kernels.cpu.variants import chosen_variants; "
        "print(load_kernels(Path('/opt/twostroke/cache/kernels')).variant == chosen_variants()[0].name)"
    )
    done = container.run("env", "CXX=/bin/false", "python", "-c", script)
    assert done.stdout.strip() == "True", done.stderr


def assert_a_router_runs(container: Container, log: Path) -> None:
    port = ports.fleet_port("127.0.0.1")
    token = "d" * 32
    container.run("bash", "-c", f"umask 077; echo {token} > /tmp/token")
    flags = ["--fleet", "127.0.0.1:9", "--token-file", "/tmp/token", "--http-port", "0", "--grpc-port", "0"]
    with container.running("twostroke", "router", *flags, "--admin-port", str(port), log=log) as process:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            health = health_pb2_grpc.HealthStub(channel)
            for service, status in (("live", "SERVING"), ("ready", "NOT_SERVING")):
                request = health_pb2.HealthCheckRequest(service=service)
                answer = health.Check(request, timeout=PATIENCE_S, wait_for_ready=True)
                assert health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status) == status, log.read_text()
        assert process.poll() is None


def assert_it_serves(container: Container, log: Path) -> None:
    """With the model that it brings along."""
    flags = ["--http-port", "0", "--grpc-port", "0", "--kv-cache-memory", "64M"]
    with container.running("twostroke", "serve", *flags, log=log) as process:
        until_s = time.monotonic() + PATIENCE_S
        while "Ctrl-C ends it" not in log.read_text():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < until_s, log.read_text()
            time.sleep(0.1)
        address = re.findall(r"http://(\S+)/v1/chat/completions", log.read_text())[-1]
        command = [sys.executable, "-m", "tools.cli", "chat", "--http", address, "--max-tokens", "5", "Hello?"]
        asked = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
        assert asked.stdout.strip(), asked.stderr
