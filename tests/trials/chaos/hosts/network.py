"""Hosts out of namespaces on one machine: each has an address, a loopback, processes and a /dev/shm of its own.

Each is a network namespace, wired to a bridge in one of its own, so that the machine's own network is left alone; and a
namespace of processes, mounts, names and System V memory, whose first process starts what runs on the host, again and
again, as a machine's service manager does. Needs root, iproute2 and util-linux.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cluster import parent_death_guard
from tests import process_table
from twostroke.base.errors import ConfigError, PeerLost

TAG = "tsh"
"""What names of our namespaces begin with; the pid of who made them follows."""
SUBNET = "10.77.0"
TOOLS = ("ip", "unshare", "nsenter", "bash")
BOOT_S = 10.0
POLL_S = 0.02
NEW_NETWORK = 0x40000000
"""CLONE_NEWNET."""
NETNS_FOLDER = Path("/var/run/netns")
INIT = """
set -e
mount --make-rprivate /
mount -t tmpfs -o size=4g tmpfs /dev/shm
mkdir -p /tmp/ray
mount -t tmpfs -o size=4g tmpfs /tmp/ray
hostname "$1"
mount --bind "$2" /etc/hosts
touch "$3"
shift 3
for service in "$@"; do
    (while :; do bash -c "$service" || true; sleep 1; done) &
done
while :; do sleep 3600 & wait $!; done
"""
"""Script of a host's first process, which takes up whoever loses a parent. A service that ends is started again after a
second, as `Restart=always` with `RestartSec=1` does."""


def why_not() -> str | None:
    """What this machine lacks; None: hosts can be made."""
    if os.geteuid() != 0:
        return "hosts out of namespaces need root"
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        return f"hosts out of namespaces need {', '.join(missing)} (apt-get install iproute2 util-linux)"
    probe = ["unshare", "--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "--mount-proc", "true"]
    tried = subprocess.run(probe, capture_output=True, text=True, check=False)
    return None if tried.returncode == 0 else f"namespaces cannot be made here: {tried.stderr.strip()}"


@dataclass(frozen=True, slots=True)
class Service:
    """Runs on a host for as long as the host does."""

    name: str
    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)

    def line(self, logs: Path) -> str:
        """For a shell: it says in its log when it begins, too."""
        settings = [f"{name}={value}" for name, value in self.environment.items()]
        command = shlex.join(["env", *settings, *self.command])
        log = shlex.quote(str(logs / f"{self.name}.log"))
        return f"exec >>{log} 2>&1 </dev/null; echo == $(date +%T.%N) {shlex.quote(self.name)} begins; exec {command}"


class Host:
    """Made by `Network.host`."""

    def __init__(self, network: Network, name: str, address: str) -> None:
        self.name, self.address = name, address
        self.services: list[Service] = []
        self._network = network
        self._wrapper: subprocess.Popen[bytes] | None = None
        self._init: int | None = None
        """Its first process, as seen from outside."""
        self._begun: list[subprocess.Popen[bytes]] = []

    @property
    def namespace(self) -> str:
        return f"{self._network.tag}-{self.name}"

    @property
    def is_up(self) -> bool:
        return self._init is not None

    def boot(self) -> None:
        """Its services begin. Raises PeerLost."""
        assert self._init is None, f"{self.name} is up"
        mark, said = self._network.folder / f"{self.name}.up", self._network.folder / f"{self.name}.boot"
        mark.unlink(missing_ok=True)
        lines = [service.line(self._network.folder) for service in self.services]
        spaces = ("--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc")
        with said.open("wb") as errors:
            self._wrapper = subprocess.Popen(
                [
                    *(sys.executable, "-I", "-S", parent_death_guard.__file__, str(os.getpid())),
                    *(str(shutil.which("ip")), "netns", "exec", self.namespace, "unshare", *spaces),
                    *("bash", "-c", INIT, "init", self.name, str(self._network.names), str(mark), *lines),
                ],
                stdin=subprocess.DEVNULL,
                stdout=errors,
                stderr=errors,
                start_new_session=True,
            )
        give_up_s = time.monotonic() + BOOT_S
        while not mark.exists():
            if self._wrapper.poll() is not None or time.monotonic() > give_up_s:
                raise PeerLost(f"host {self.name} does not boot: {said.read_text()}")
            time.sleep(POLL_S)
        # `ip netns exec` becomes `unshare`, whose only child is the host's first process.
        self._init = process_table.below(self._wrapper.pid)[0].pid

    def begin(self, service: Service) -> None:
        """Now, and again whenever the host boots."""
        self.services.append(service)
        loop = f"while :; do bash -c {shlex.quote(service.line(self._network.folder))} || true; sleep 1; done"
        # It ends with the host's first process, like everything there.
        self._begun.append(subprocess.Popen([*self._entering(), "bash", "-c", loop], start_new_session=True))

    def run(self, *command: str, environment: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        """On this host, to its end, whatever that is."""
        variables = os.environ | (environment or {})
        return subprocess.run([*self._entering(), *command], capture_output=True, text=True, check=False, env=variables)

    def pids(self, executable: str = "") -> list[int]:
        """Returns the ids of the host's processes, with `executable` at the end of what they run."""
        return [pid for pid in _pids() if self._has(pid) and executable_of(pid).endswith(executable)]

    # Faults

    def pull_cable(self) -> None:
        """Nobody hears of it: what is sent vanishes."""
        self._network.link("set", self._network.port_of(self), "down")

    def plug_in(self) -> None:
        self._network.link("set", self._network.port_of(self), "up")

    def crash(self) -> None:
        """All of its processes are killed at once; their peers see connections end."""
        assert self._init is not None
        assert self._wrapper is not None
        os.kill(self._init, signal.SIGKILL)
        for process in (self._wrapper, *self._begun):
            process.wait()
        self._init = None
        self._begun.clear()

    def power_off(self) -> None:
        """Its peers see nothing at all."""
        self.pull_cable()
        self.crash()

    def power_on(self) -> None:
        self.plug_in()
        self.boot()

    def kill(self, executable: str) -> None:
        """Its processes that run it, and nothing else."""
        for pid in self.pids(executable):
            os.kill(pid, signal.SIGKILL)

    def freeze(self) -> None:
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _entering(self) -> list[str]:
        assert self._init is not None, f"{self.name} is down"
        return ["nsenter", "-t", str(self._init), "-m", "-u", "-i", "-n", "-p", "--"]

    def _has(self, pid: int) -> bool:
        return self._init is not None and _namespace_of(pid) == _namespace_of(self._init)


class Network:
    """Use `network`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        """Hosts see it, too; their logs are here."""
        self.names = folder / "hosts"
        """Their /etc/hosts: there is nobody else whom they could ask."""
        self.tag = f"{TAG}{os.getpid()}"
        self._switch = f"{self.tag}-switch"
        self._hosts: list[Host] = []

    def host(self, name: str) -> Host:
        """Wired, and not booted yet."""
        host = Host(self, name, f"{SUBNET}.{10 + len(self._hosts)}")
        self._hosts.append(host)
        _ip("netns", "add", host.namespace)
        self.link("add", self.port_of(host), "type", "veth", "peer", "name", "eth0", "netns", host.namespace)
        self.link("set", self.port_of(host), "master", "br0", "up")
        _ip("-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            _ip("-n", host.namespace, "link", "set", device, "up")
        # It leads nowhere; but Ray asks the kernel which address it would take to the world.
        _ip("-n", host.namespace, "route", "add", "default", "dev", "eth0")
        names = [f"{host.address} {host.name}\n" for host in self._hosts]
        self.names.write_text("".join(["127.0.0.1 localhost\n", *names]))
        return host

    def port_of(self, host: Host) -> str:
        """Returns the name of the switch's port."""
        return f"port-{host.name}"[:15]

    def link(self, *arguments: str) -> None:
        _ip("-n", self._switch, "link", *arguments)

    def open(self) -> None:
        _ip("netns", "add", self._switch)
        self.link("add", "br0", "type", "bridge")
        self.link("set", "br0", "up")

    def close(self) -> None:
        for host in self._hosts:
            if host.is_up:
                host.crash()
        for host in self._hosts:
            _ip("netns", "del", host.namespace)
        _ip("netns", "del", self._switch)


@contextlib.contextmanager
def network(folder: Path) -> Iterator[Network]:
    """Everything on its hosts ends with it. Raises ConfigError where there can be none."""
    reason = why_not()
    if reason is not None:
        raise ConfigError(reason)
    _remove_leftovers()
    made = Network(folder)
    made.open()
    try:
        yield made
    finally:
        made.close()


@contextlib.contextmanager
def being_on(host: Host) -> Iterator[None]:
    """What this thread, and those that it starts, do over the network, they do from there."""
    with open("/proc/thread-self/ns/net") as before, (NETNS_FOLDER / host.namespace).open() as there:
        _enter(there.fileno())
        try:
            yield
        finally:
            _enter(before.fileno())


def executable_of(pid: int) -> str:
    """What it runs; empty where it is gone."""
    try:
        return str(Path(f"/proc/{pid}/exe").readlink())
    except OSError:
        return ""


def _namespace_of(pid: int) -> str:
    try:
        return str(Path(f"/proc/{pid}/ns/pid").readlink())
    except OSError:
        return f"none: {pid} is gone"


def _pids() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]


def _enter(namespace: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(namespace, NEW_NETWORK) != 0:
        raise OSError(ctypes.get_errno(), "setns")


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ConfigError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


def _remove_leftovers() -> None:
    """Removes names that killed runs have left: their hosts have died with them, names remain."""
    listed = subprocess.run(["ip", "-json", "netns", "list"], capture_output=True, text=True, check=True).stdout
    for entry in json.loads(listed or "[]"):
        name = str(entry["name"])
        pid = name.removeprefix(TAG).partition("-")[0]
        if name.startswith(TAG) and pid.isdigit() and not Path(f"/proc/{pid}").exists():
            _ip("netns", "del", name)
