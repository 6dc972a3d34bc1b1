"""Files for `ray up` and Ray jobs: what can be known of them without machines that `ray up` could reach."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

from cluster.commands.serving.up import run as up
from cluster.file.cluster import read
from tests.deploy.tools import ROOT
from tools.cli import PROGRAM

RAY_FILES = sorted((ROOT / "deploy" / "ray").glob("cluster.*.yaml"))
EXAMPLES = sorted((ROOT / "deploy" / "examples").glob("*.yaml"))


@pytest.fixture(params=RAY_FILES, ids=lambda path: path.name)
def cluster(request: pytest.FixtureRequest) -> dict[str, Any]:
    return dict(yaml.safe_load(request.param.read_text()))


def test_ray_takes_the_file(cluster: dict[str, Any]) -> None:
    prepared = prepare_config(cluster)
    validate_config(prepared)
    if cluster["provider"]["type"] == "local":
        (workers,) = prepared["available_node_types"].values()
        assert workers["min_workers"] == len(cluster["provider"]["worker_ips"])


def test_a_key_that_ray_does_not_know_is_refused(cluster: dict[str, Any]) -> None:
    with pytest.raises(Exception, match="worker_start_commands"):
        validate_config(prepare_config(cluster | {"worker_start_commands": []}))


def test_nodes_are_started_by_scripts_that_are_there_with_variables_that_they_read(cluster: dict[str, Any]) -> None:
    commands = cluster["head_start_ray_commands"] + cluster["worker_start_ray_commands"]
    for command in commands:
        (script,) = re.findall(r"/opt/twostroke/(deploy/ray/\S+\.sh)", command)
        assert os.access(ROOT / script, os.X_OK)
        read_there = (ROOT / script).read_text() + (ROOT / "deploy/ray/environment.sh").read_text()
        for variable in re.findall(r"(\w+)=", command):
            assert re.search(rf"\b{variable}\b", read_there), variable


def test_a_login_shell_of_a_node_that_is_set_up_finds_the_commands(cluster: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / ".twostroke").mkdir()
    (tmp_path / ".twostroke/ray.token").touch()
    login = 'source ~/.bashrc; echo "${PATH%%:*} $RAY_AUTH_MODE"; wc -l < ~/.bashrc'
    line = "; ".join([*cluster["setup_commands"] * 2, login])  # `ray up` may be repeated
    environment = {"HOME": str(tmp_path), "PATH": os.environ["PATH"]}
    done = subprocess.run(["bash", "-c", line], env=environment, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("/opt/twostroke/.venv/bin token\n1\n", "")


def test_groups_of_nodes_are_labelled_with_the_roles_of_workers() -> None:
    groups = yaml.safe_load((ROOT / "deploy/ray/cluster.aws.yaml").read_text())["available_node_types"]
    assert {name: group.get("labels", {}).get("role") for name, group in groups.items()} == {
        "head": None,
        "prefill": "prefill",
        "decode": "decode",
    }


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda path: path.name)
def test_examples_are_cluster_files(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["up", "-f", str(file), "--check"]
    assert up(PROGRAM.parser(arguments).parse_args(arguments)) == 0
    assert "smollm2-135m" in capsys.readouterr().out
    assert read(file).config.routers == 1


def test_a_job_without_a_file_or_a_token_is_refused_in_one_line(tmp_path: Path) -> None:
    script = ROOT / "deploy/ray/job.sh"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    for arguments, said in (
        ([], "name the cluster file"),
        (["/no/such/file"], "/no/such/file: there is no such file"),
        ([str(EXAMPLES[0])], "RAY_AUTH_TOKEN_PATH is not set"),
    ):
        done = subprocess.run(
            [script, *arguments], env=environment, capture_output=True, text=True, check=False, cwd=tmp_path
        )
        assert done.returncode == 2
        assert done.stderr.count("\n") == 1
        assert said in done.stderr


def test_a_job_brings_its_file_and_goes_on_with_the_fleet(tmp_path: Path) -> None:
    """Ray is played."""
    ray, token = tmp_path / "ray", tmp_path / "token"
    ray.write_text('#!/bin/bash\necho "$2" >> "${0%/*}/calls"; echo "$*"; cat "$7/cluster.yaml"\n')
    ray.chmod(0o755)
    token.write_text("x")
    environment = os.environ | {"RAY": str(ray), "RAY_AUTH_TOKEN_PATH": str(token)}
    job = [ROOT / "deploy/ray/job.sh", ROOT / "deploy/examples/hosts.yaml"]
    done = subprocess.run(job, env=environment, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert (tmp_path / "calls").read_text().split() == ["delete", "submit"]
    asked, _, brought = done.stdout.partition("\n")
    assert asked.startswith("job submit --no-wait --submission-id twostroke --working-dir ")
    (arguments,) = re.findall(r" -- twostroke (.*)$", asked)
    assert PROGRAM.parser(["up"]).parse_args(arguments.split()).keep
    assert brought == (ROOT / "deploy/examples/hosts.yaml").read_text()
