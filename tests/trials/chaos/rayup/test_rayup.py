"""`make rayup`: deploy/README.md's section on `ray up`, typed on a host of its own at hosts with sshd."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deploy.tools import ROOT, tool
from tests.trials.chaos.hosts.network import Service, network, why_not
from tests.trials.chaos.rayup.machines import (
    ENVIRONMENT,
    EXTRA,
    PATIENCE_S,
    Client,
    Machines,
    processes,
    until,
)

PACED = "paced:step_ms=20,max_model_len=2048"
EXPORT = (
    "export RAY_API_SERVER_ADDRESS=http://127.0.0.1:8265 RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=~/.twostroke/ray.token"
)
CLUSTER = "/root/cluster.yaml"
JOB = "/root/hosts.yaml"
WORKERS = ("ray::PrefillActor", "ray::DecodeActor")
RAY = ("/raylet", "gcs_server")
NODES = """
import json, ray, time
ray.init(address="auto", log_to_driver=False, logging_level="ERROR")
for _ in range(300):
    alive = {node["NodeManagerAddress"]: node["Labels"].get("role") for node in ray.nodes() if node["Alive"]}
    if len(alive) == COUNT:
        break
    time.sleep(2)
print(json.dumps(alive))
"""


@pytest.fixture
def machines() -> Iterator[Machines]:
    reason = why_not()
    if reason is not None:
        pytest.skip(f"NOT CHECKED: {reason}")
    for program in ("sshd", "rsync", "ssh-keygen"):
        tool(program)
    if not (EXTRA / ".installed").exists():
        pytest.skip("NOT CHECKED: ray[default] is missing; get it with `make .venv/nodes/.installed`")
    folder = Path(tempfile.mkdtemp(prefix="rayup-", dir="/var/tmp"))
    try:
        with network(folder) as made:
            yield Machines(made)
    finally:
        shutil.rmtree(folder)


def cluster_file(machines: Machines) -> str:
    """deploy/ray/cluster.local.yaml, with other addresses."""
    text = (ROOT / "deploy/ray/cluster.local.yaml").read_text()
    nodes = ", ".join(node.address for node in machines.nodes.values())
    return replaced(
        text,
        {
            "10.0.0.10\n": f"{machines.head.address}\n",
            "[10.0.0.11, 10.0.0.12, 10.0.0.13]": f"[{nodes}]",
        },
    )


def job_file() -> str:
    """deploy/examples/hosts.yaml, smaller."""
    text = (ROOT / "deploy/examples/hosts.yaml").read_text()
    small = {"model: smollm2-135m": f"model: {PACED}\n  served_model_name: tiny", "count: 2": "count: 1"}
    return replaced(text, small) + "cache: {kv_cache_memory: 1M}\n"


def replaced(text: str, changes: dict[str, str]) -> str:
    for usual, here in changes.items():
        assert usual in text
        text = text.replace(usual, here)
    return text


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_ray_up_makes_a_cluster_that_serves_and_ray_down_ends_it(machines: Machines) -> None:
    machines.boot()
    client = machines.client
    for path, text in ((CLUSTER, cluster_file(machines)), (JOB, job_file())):
        client(f"cat > {path} <<'END'\n{text}END")
    client(f"ray up --yes {CLUSTER}")
    assert_all_have_joined(machines)
    forward(machines, f"ray dashboard {CLUSTER}")

    client(f"{EXPORT}; deploy/ray/job.sh {JOB}")
    following = Following(client, f"{EXPORT}; ray job logs --follow twostroke")
    logs = until_logged(machines, "Ctrl-C ends it")
    for role, node in machines.nodes.items():
        assert f"{role}-0 serves at {node.address}:" in logs
    assert_it_answers(machines)

    workers = {role: processes(node, *WORKERS) for role, node in machines.nodes.items()}
    assert [len(found) for found in workers.values()] == [1, 1]
    client(f"{EXPORT}; ray job stop twostroke")
    assert "Ctrl-C ends it" in following.to_its_end()
    client(f"{EXPORT}; deploy/ray/job.sh {JOB}")
    until_logged(machines, "adopting it.*Ctrl-C ends it")
    assert_it_answers(machines)
    assert workers == {role: processes(node, *WORKERS) for role, node in machines.nodes.items()}

    client(f"{EXPORT}; ray job stop twostroke")
    client(f"ray exec {CLUSTER} 'twostroke down --address auto'")
    until(lambda: not any(processes(node, *WORKERS) for node in machines.nodes.values()), machines.told)
    client(f"ray down --yes {CLUSTER}")
    assert not processes(machines.head, *RAY)
    # Nobody ends it on the other hosts: it ends once the head has been gone for two minutes.
    until(lambda: not any(processes(node, *RAY) for node in machines.nodes.values()), machines.told)


def assert_all_have_joined(machines: Machines) -> None:
    script = NODES.replace("COUNT", str(1 + len(machines.nodes)))
    said = machines.client(f"ray exec {CLUSTER} {shlex.quote(f'python -c {shlex.quote(script)}')}")
    (joined,) = re.findall(r"^{.*}", said, re.MULTILINE)
    roles = {node.address: role for role, node in machines.nodes.items()}
    assert json.loads(joined) == {machines.head.address: None, **roles}, f"{joined}\n{machines.told()}"


def forward(machines: Machines, command: str) -> None:
    """For as long as the client's host is up."""
    settings = [f"{name}={value}" for name, value in ENVIRONMENT.items()]
    machines.client.host.begin(Service("dashboard", ["env", "-i", *settings, "bash", "-c", command]))
    until(lambda: machines.client.tried("curl -sS http://127.0.0.1:8265/").returncode == 0, machines.told)


def until_logged(machines: Machines, pattern: str) -> str:
    """Waits until a job of that name has logged the pattern, and returns it."""
    logs = ""

    def is_there() -> bool:
        nonlocal logs
        logs = machines.client.tried(f"{EXPORT}; ray job logs twostroke").stdout
        status = machines.client.tried(f"{EXPORT}; ray job status twostroke 2>&1").stdout
        assert "failed" not in status, f"{status}\n{logs}\n{machines.told()}"
        return re.search(pattern, logs, re.DOTALL) is not None

    until(is_there, lambda: f"{logs}\n{machines.told()}")
    return logs


def assert_it_answers(machines: Machines) -> None:
    address = machines.head.address
    assert machines.client(f"twostroke chat --grpc {address}:50051 --max-tokens 3 'Hello?'").strip()
    assert '"tiny"' in machines.client(f"curl -sS http://{address}:8000/v1/models")


class Following:
    """What a command prints that ends by itself, some time later."""

    def __init__(self, client: Client, command: str) -> None:
        self._client = client
        self._said = ""
        self._thread = threading.Thread(target=self._follow, args=(command,), daemon=True)
        self._thread.start()

    def to_its_end(self) -> str:
        self._thread.join(PATIENCE_S)
        return self._said

    def _follow(self, command: str) -> None:
        self._said = self._client(command)
