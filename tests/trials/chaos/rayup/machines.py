"""Hosts that `ray up` reaches: each with an sshd, a user `twostroke`, and a /home, /etc, /opt and so on of its own.

Hosts out of namespaces (`tests.trials.chaos.hosts.network`) see this machine's files. Here each has an overlay over
those that are written to, so that nothing of the machine changes, and this checkout in /opt/twostroke. Whoever types
the commands sits on one more host, without sshd.
"""

from __future__ import annotations

import secrets
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.deploy.tools import ROOT
from tests.trials.chaos.hosts.network import Host, Network, Service

OPT = Path("/opt/twostroke")
EXTRA = Path(sys.prefix) / "nodes"
"""A venv over ours, with the rest of `ray[default]`: `make .venv/nodes/.installed`."""
PATIENCE_S = 900
NODES = f"nodes/lib/python3.{sys.version_info.minor}/site-packages"
SETTINGS = {
    "PYTHONPATH": f"{OPT}:{OPT}/.venv/{NODES}",
    # This machine may be slow.
    "START_TIMEOUT_S": "400",
    "RAY_raylet_start_wait_time_s": "300",
    "AUTOSCALER_HEARTBEAT_TIMEOUT_S": "300",
    "RAY_health_check_timeout_ms": "60000",
    "RAY_health_check_failure_threshold": "10",
}
"""What whoever comes in over ssh finds in the environment."""
ENVIRONMENT = {
    **SETTINGS,
    "HOME": "/root",
    "PATH": f"{OPT}/.venv/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "LANG": "C.UTF-8",
    "TERM": "dumb",
}
"""Environment of the person who types the commands."""
BECOME = r"""
set -e
files=$1 names=$2 checkout=$3
shift 3
if [ ! -e /run/prepared ]; then
    mount -t tmpfs tmpfs /run
    for place in root home etc opt tmp var/log; do
        own=/run/layers/$place
        mkdir -p "$own/upper" "$own/work"
        mount -t overlay overlay -o "lowerdir=/$place,upperdir=$own/upper,workdir=$own/work" "/$place"
    done
    mount --bind "$names" /etc/hosts
    chmod 1777 /tmp
    rm -rf /tmp/ray
    mkdir -p /tmp/ray /opt/twostroke /run/sshd
    mount -t tmpfs tmpfs /tmp/ray
    mount --bind "$checkout" /opt/twostroke
    rm -rf /root/.ray
    chmod 711 /root  # this machine's Python may lie below it
    useradd --create-home --shell /bin/bash --password '*' twostroke
    (umask 077; cp -rT "$files/root" /root)
    mkdir -p /etc/twostroke
    cp -rT "$files/etc" /etc/twostroke
    touch /run/prepared
fi
cd /root
exec "$@"
"""


class Machines:
    """Use it where a network is open; its hosts are up, and reached over ssh, once `boot` returns."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self.folder = network.folder
        _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / "key"))
        self.folder.chmod(0o711)  # sshd reads who may come in as the user who wants to
        self.head = self._machine("head")
        self.nodes = {role: self._machine(role, role) for role in ("prefill", "decode")}
        self.client = Client(network.host("client"))
        self._prepare(self.client.host, ["sleep", "infinity"])
        self._place("client", "root/.ssh/id_ed25519", (self.folder / "key").read_text())
        self._place("client", "root/.twostroke/ray.token", secrets.token_hex(32))

    def boot(self) -> None:
        hosts = (self.head, *self.nodes.values(), self.client.host)
        for host in hosts:
            host.boot()
        until(lambda: all(host.run("test", "-e", "/run/prepared").returncode == 0 for host in hosts), self.told)
        knocks = " && ".join(f"(exec 3<>/dev/tcp/{host.address}/22)" for host in hosts[:-1])
        until(lambda: self.client.tried(knocks).returncode == 0, self.told)

    def told(self) -> str:
        """Returns the output of all of them."""
        return "\n".join(f"{log}:\n{log.read_text(errors='replace')[-3000:]}" for log in self.folder.glob("*.log"))

    def _machine(self, name: str, role: str = "") -> Host:
        host = self._network.host(name)
        _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / f"{name}.host-key"))
        config = self.folder / f"{name}.sshd"
        config.write_text(
            f"ListenAddress {host.address}\nHostKey {self.folder}/{name}.host-key\n"
            f"AuthorizedKeysFile {self.folder}/key.pub\nStrictModes no\nPermitRootLogin no\n"
            "PasswordAuthentication no\nKbdInteractiveAuthentication no\nUsePAM no\nPidFile none\nMaxStartups 50\n"
            f"SetEnv {' '.join(f'{key}={value}' for key, value in SETTINGS.items())}\n"
        )
        self._prepare(host, ["/usr/sbin/sshd", "-D", "-e", "-f", str(config)])
        if role:
            self._place(name, "etc/role", role)
        return host

    def _prepare(self, host: Host, command: Sequence[str]) -> None:
        for place in ("root", "etc"):
            (self.folder / f"{host.name}.files" / place).mkdir(parents=True, exist_ok=True)
        files = self.folder / f"{host.name}.files"
        become = ["bash", "-c", BECOME, "become", str(files), str(self._network.names), str(ROOT), *command]
        host.services.append(Service(f"system-{host.name}", become))

    def _place(self, host: str, path: str, text: str) -> None:
        place = self.folder / f"{host}.files" / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)


class Client:
    """The host on which commands are typed."""

    def __init__(self, host: Host) -> None:
        self.host = host

    def tried(self, command: str) -> subprocess.CompletedProcess[str]:
        """A line of a shell, to its end."""
        settings = [f"{name}={value}" for name, value in ENVIRONMENT.items()]
        patience = ("timeout", str(PATIENCE_S))
        return self.host.run("env", "-i", *settings, *patience, "bash", "-c", f"cd {OPT}; {command}")

    def __call__(self, command: str) -> str:
        """What it printed. It must have worked."""
        done = self.tried(command)
        said = f"{done.stdout}\n{done.stderr}"
        assert done.returncode == 0, f"{command}: {done.returncode}\n{said[-6000:]}"
        return said


def processes(host: Host, *titles: str) -> set[int]:
    """Returns processes of the host, with one of these words in how they call themselves; as seen from outside."""
    found = set()
    for pid in host.pids():
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
        except OSError:
            continue
        if any(title in words for title in titles):
            found.add(pid)
    return found


def until(is_so: Callable[[], bool], explain: Callable[[], str]) -> None:
    give_up_s = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < give_up_s, explain()
        time.sleep(1.0)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{shlex.join(command)}: {done.stderr}"
