"""What the hosts of a cluster run, by the start scripts of deploy/ray: Ray's head, nodes that join it, the launcher.

head      Ray's head, supervisor, launcher, routers
prefill   a node with role=prefill
decode-N  nodes with role=decode
client    nothing: whoever asks is there
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import subprocess
import sys
from pathlib import Path

import cluster
from cluster.clients import control_socket, state_file
from tests.trials.chaos.hosts.network import Host, Network, Service
from twostroke.base.errors import ConfigError, ServeError
from twostroke.config import Role

CHECKOUT = Path(cluster.__file__).parents[1]
SCRIPTS = CHECKOUT / "deploy" / "ray"
RAY = Path(sys.executable).with_name("ray")
HEAD_PORT = 6379
VALID_DAYS = "2"
STARTED = "Ray runtime started."
FLEET_PORT, ADMIN_PORT = 50050, 50055
POLL_S = 0.1
JOIN_S = 400
"""For Ray on a host to start, on a busy machine."""


CLUSTER = """
ray: {{address: "{head}", wait: 60}}
fleet: {{port: {port}}}
model: {{model: "paced:step_ms=20,prefill_tokens_per_s=4000,max_model_len=2048,page_bytes=4096,eos=1"}}
# A worker takes half a node: Ray fills the emptier one first, and one node has room for two where another is gone.
prefill: {{count: 1, resources: {{num_cpus: 1}}, prefer_labels: {{role: prefill}}}}
decode: {{count: {decode}, resources: {{num_cpus: 1}}, prefer_labels: {{role: decode}}}}
workers: {{transports: [tcp]}}
# Some requests call tools.
output: {{tool_call_parser: hermes}}
routers: {{count: 2, host: {host}, admin_port: {admin}}}
# All prompts travel: nobody weighs whether that is worth it.
routing: {{policy: round-robin}}
cache: {{kv_cache_memory: 4M}}
schedule: {{local_prefill: false}}
"""


class Site:
    """One network with the hosts that the module's docstring names; none of them is booted yet."""

    def __init__(self, network: Network, *, decode: int, head_takes: Role | None = None) -> None:
        """`head_takes`: the head is a node for workers of that role, too, and has no host of its own."""
        self.folder = network.folder
        """With the logs of all hosts."""
        self.fleet_token = secrets.token_hex(32)
        self.ray_token = self._secret("ray.token", secrets.token_hex(32))
        self._fleet_token_path = self._secret("fleet.token", self.fleet_token)
        self._authority = Authority(self.folder / "tls")
        self.head = network.host("head")
        self.client = network.host("client")
        self.head.services.append(Service("ray-head", [str(SCRIPTS / "start-head.sh")], self._head(head_takes)))
        self.nodes: dict[str, Host] = {}
        roles = [*([] if head_takes is Role.PREFILL else [Role.PREFILL]), *[Role.DECODE] * decode]
        for number, role in enumerate(roles):
            name = "prefill" if role is Role.PREFILL else f"decode-{number + decode - len(roles)}"
            node = self.nodes[name] = network.host(name)
            command = [str(SCRIPTS / "start-worker.sh")]
            node.services.append(Service(f"ray-{name}", command, self._node(node, role)))

    async def boot(self, within_s: float) -> str | None:
        """All but the client, the head first; None once they are one Ray cluster, else what is missing.

        One after the other: Ray gives up a node whose helpers are slow to begin, as they are where many begin at once.
        """
        for host in (self.head, *self.nodes.values()):
            await asyncio.to_thread(host.boot)
            missing = await self.joined_within(within_s, host)
            if missing is not None:
                return missing
        return None

    def host_at(self, address: str) -> Host:
        """HOST:PORT of a worker."""
        wanted = address.rpartition(":")[0]
        return next(host for host in (self.head, *self.nodes.values()) if host.address == wanted)

    def has_host_for(self, role: str) -> bool:
        """A host of that role which is nothing else."""
        return any(name.startswith(role) for name in self.nodes)

    def joined(self, host: Host) -> int:
        """How often Ray has started there."""
        log = self.folder / f"{host.services[0].name}.log"
        return log.read_text(errors="replace").count(STARTED) if log.exists() else 0

    async def joined_within(self, seconds: float, host: Host, before: int = 0) -> str | None:
        """None as soon as Ray has started there once more than `before`; else what is missing."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self.joined(host) <= before:  # of another host
                    await asyncio.sleep(POLL_S)
                return None
        return f"{host.name} has not joined within {seconds:g} s"

    async def launcher_within(self, seconds: float) -> str | None:
        """Returns None once it takes commands that reach the supervisor; else what is missing."""
        said: object = "it has not said where it is"
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while True:
                    for path in self.runtime_folder.glob("twostroke/*.json"):
                        try:
                            await asyncio.to_thread(control_socket.send, Path(state_file.read(path).log_dir), "scaling")
                            return None
                        except ServeError as error:
                            said = error
                    await asyncio.sleep(POLL_S)
        return f"the launcher takes no commands within {seconds:g} s: {said}"

    @property
    def head_address(self) -> str:
        return f"{self.head.address}:{HEAD_PORT}"

    @property
    def fleet_address(self) -> str:
        return f"{self.head.address}:{FLEET_PORT}"

    @property
    def runtime_folder(self) -> Path:
        """The launcher's folder, where it says that it is ready."""
        return self.folder / "run"

    def launch(self, *, decode: int) -> None:
        """The launcher is a service of the head host, too; begun again, it goes on with the fleet that it finds."""
        for folder in (self.runtime_folder, self.folder / "t"):
            folder.mkdir(exist_ok=True)
        environment = {
            **self.credentials(self.head),
            "TWOSTROKE_TOKEN_FILE": str(self._fleet_token_path),
            "XDG_RUNTIME_DIR": str(self.runtime_folder),
            "TMPDIR": str(self.folder / "t"),
        }
        file = self.folder / "cluster.yaml"
        file.write_text(
            CLUSTER.format(
                head=self.head_address, host=self.head.address, port=FLEET_PORT, admin=ADMIN_PORT, decode=decode
            )
        )
        self.head.begin(Service("up", [sys.executable, "-P", "-m", "cluster.cli", "up", "-f", str(file)], environment))

    def credentials(self, host: Host) -> dict[str, str]:
        """Environment of a process that talks to Ray on this host."""
        return {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(self.ray_token),
            "RAY_USE_TLS": "1",
            **self._authority.variables(host),
            "PYTHONPATH": str(CHECKOUT),
        }

    def stranger(self, host: Host) -> dict[str, str]:
        """Environment of a process with a token of its own, and otherwise everything that the host's own node has."""
        return self._node(host, Role.DECODE) | {
            "RAY_AUTH_TOKEN_PATH": str(self._secret("stranger.token", secrets.token_hex(32)))
        }

    def without_tls(self, host: Host) -> dict[str, str]:
        """Environment of a process that has the right token and speaks in clear text."""
        return {name: value for name, value in self._node(host, Role.DECODE).items() if "TLS" not in name}

    def _head(self, role: Role | None) -> dict[str, str]:
        variables = self.credentials(self.head) | self._common(self.head)
        # The head's memory of actors is on disk, so that it can be restarted.
        variables |= {"PORT": str(HEAD_PORT), "GCS_STORAGE": str(self.folder / "gcs")}
        return variables | ({} if role is None else {"ROLE": role.value})

    def _node(self, host: Host, role: Role) -> dict[str, str]:
        return self.credentials(host) | self._common(host) | {"HEAD": self.head_address, "ROLE": role.value}

    def _common(self, host: Host) -> dict[str, str]:
        return {
            "NODE_IP": host.address,
            "RAY": str(RAY),
            "START_TIMEOUT_S": str(JOIN_S),
            "NUM_CPUS": "2",
            "RAY_raylet_start_wait_time_s": "300",
        }

    def _secret(self, name: str, value: str) -> Path:
        path = self.folder / name
        with os.fdopen(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), "w") as file:
            file.write(value)
        return path


class Authority:
    """Signs a certificate for every host."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder = folder
        _openssl("-subj", "/CN=authority", *self._files("ca"))

    def variables(self, host: Host) -> dict[str, str]:
        """For Ray."""
        name = host.name
        if not (self.folder / f"{name}.crt").exists():
            signed_by = ("-CA", str(self.folder / "ca.crt"), "-CAkey", str(self.folder / "ca.key"))
            names = f"subjectAltName=IP:{host.address},IP:127.0.0.1,DNS:localhost"
            _openssl("-subj", f"/CN={name}", *signed_by, "-addext", names, *self._files(name))
        return {
            "RAY_TLS_SERVER_CERT": str(self.folder / f"{name}.crt"),
            "RAY_TLS_SERVER_KEY": str(self.folder / f"{name}.key"),
            "RAY_TLS_CA_CERT": str(self.folder / "ca.crt"),
        }

    def _files(self, name: str) -> tuple[str, ...]:
        return ("-keyout", str(self.folder / f"{name}.key"), "-out", str(self.folder / f"{name}.crt"))


def _openssl(*arguments: str) -> None:
    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
    command = ["openssl", "req", "-x509", "-days", VALID_DAYS, *key, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ConfigError(f"openssl: {done.stderr.strip()}")
