"""A pod out of namespaces: one address, shared volumes, containers that see no more than Kubernetes would show them.

A container has a read-only root (this machine's, with what the image would have bound into it), its own processes, the
pod's user, no capability and no way to get one. Must run where the network is our own: see `network`.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.trials.chaos.pods.manifests import Manifests, Object

BRIDGE = "pods"
SUBNET = "10.78.0"
GATEWAY = f"{SUBNET}.1"
"""Address of the process that runs the pods: probes come from here."""

ROUTE = f"route add default via {GATEWAY}"
"""Ray looks here for its own address, by way of one that is somewhere else."""

CONTAINER = r"""
set -e
mount --make-rprivate /
mkdir -p "$BASE/upper" "$BASE/work" "$BASE/root"
mount -t overlay overlay -o lowerdir=/,upperdir="$BASE/upper",workdir="$BASE/work" "$BASE/root"
cd "$BASE/root"
chmod 711 root  # this machine's Python lies below it, which an image's would not
mount -t proc proc proc
mount --rbind /dev dev
mount --bind "$RESOLVER" etc/resolv.conf
while IFS=$'\t' read -r source target how; do
    mkdir -p ".$target"
    mount --bind "$source" ".$target"
    [ "$how" != ro ] || mount -o remount,bind,ro ".$target"
done < "$MOUNTS"
mount -o remount,ro "$BASE/root"
exec chroot . setpriv --reuid "$USER_ID" --regid "$GROUP_ID" --groups "$FS_GROUP" --no-new-privs --inh-caps=-all \
    --bounding-set=-all -- env -i "$@"
"""


@dataclass(frozen=True, slots=True)
class Image:
    """What stands in for the image: this machine's root, and these."""

    environment: Mapping[str, str]
    folders: Mapping[str, Path] = field(default_factory=dict)
    """Mounted read-only, by path in the container."""
    needed: Sequence[Path] = ()
    """Folders of this machine that its programs lie in. A volume at a folder above one of them does not hide it."""


@dataclass(slots=True)
class Container:
    name: str
    spec: Object
    is_sidecar: bool
    process: subprocess.Popen[bytes] | None = None
    starts: int = 0

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None


class Pod:
    def __init__(
        self, name: str, template: Object, address: str, manifests: Manifests, image: Image, folder: Path
    ) -> None:
        self.name = name
        self.labels: Mapping[str, str] = template["metadata"]["labels"]
        self.address = address
        self.spec: Object = template["spec"]
        self.folder = folder / name
        self._manifests = manifests
        self._image = image
        self._pause: subprocess.Popen[bytes] | None = None
        sidecars = [Container(each["name"], each, is_sidecar=True) for each in self.spec.get("initContainers", ())]
        main = [Container(each["name"], each, is_sidecar=False) for each in self.spec["containers"]]
        self.containers = [*sidecars, *main]

    def prepare(self) -> None:
        (self.folder / "volumes").mkdir(parents=True)
        for volume in self.spec.get("volumes", ()):
            self._fill(volume)
        if self.spec.get("shareProcessNamespace"):
            apart = ["unshare", "--pid", "--fork", "--kill-child", "sleep", "infinity"]
            self._pause = subprocess.Popen(apart, start_new_session=True)
        _run("ip", "netns", "add", self.name)
        near = f"v{self.address.rpartition('.')[2]}"
        _run("ip", "link", "add", near, "type", "veth", "peer", "name", "eth0", "netns", self.name)
        _run("ip", "link", "set", near, "master", BRIDGE, "up")
        for command in (f"addr add {self.address}/24 dev eth0", "link set eth0 up", "link set lo up", ROUTE):
            _run("ip", "-n", self.name, *command.split())

    def start(self, container: Container) -> None:
        container.starts += 1
        spec = container.spec
        command = [*spec.get("command", ()), *spec.get("args", ())]
        with self.log_of(container.name).open("ab") as log:
            container.process = subprocess.Popen(
                self._entering(container, self._expanded(command, self._environment(spec))),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=os.environ | self._settings(container),
                start_new_session=True,
            )

    def execute(
        self, container: Container, command: Sequence[str], timeout_s: float
    ) -> subprocess.CompletedProcess[str]:
        """Runs one more process in the container, as preStop and exec probes do."""
        assert container.process is not None
        inside = self._first_process(container)
        enter = ["nsenter", "-t", str(inside), "-m", "-n", "-p", "-i", f"--root=/proc/{inside}/root", "--"]
        environment = [f"{name}={value}" for name, value in self._environment(container.spec).items()]
        return subprocess.run(
            [*enter, *self._privileges(), "env", "--chdir=/", "-i", *environment, *command],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def signal(self, container: Container, number: signal.Signals) -> None:
        """To its first process, as the kubelet does."""
        if container.is_running:
            os.kill(self._first_process(container), number)

    def log_of(self, container: str) -> Path:
        return self.folder / f"{container}.log"

    def _fill(self, volume: Object) -> None:
        place = self.folder / "volumes" / volume["name"]
        place.mkdir()
        group = self.spec["securityContext"].get("fsGroup", 0)
        files = self._manifests.files(volume)
        os.chown(place, 0, group)
        place.chmod(0o2777 if files is None else 0o2750)
        source = volume.get("secret") or volume.get("configMap") or {}
        for name, content in (files or {}).items():
            file = place / name
            file.write_bytes(content)
            os.chown(file, 0, group)
            file.chmod(source.get("defaultMode", 0o644))

    def _environment(self, spec: Object) -> dict[str, str]:
        """Returns an image's variables, the kubelet's own, and those of the manifests."""
        kubelet = {"KUBERNETES_SERVICE_HOST": "10.96.0.1"}
        return {**self._image.environment, **kubelet, **self._manifests.environment(spec, self.address, self.labels)}

    def _expanded(self, command: Sequence[str], environment: Mapping[str, str]) -> list[str]:
        return [re.sub(r"\$\((\w+)\)", lambda found: environment[found[1]], word) for word in command]

    def _entering(self, container: Container, command: list[str]) -> list[str]:
        environment = [f"{name}={value}" for name, value in self._environment(container.spec).items()]
        separate = ["unshare", "--mount", "--pid", "--fork", "--kill-child"]
        if self._pause is not None:
            separate = ["nsenter", "-t", str(_child(self._pause)), "-p", "--", "unshare", "--mount"]
        return [
            "ip",
            "netns",
            "exec",
            self.name,
            *separate,
            "bash",
            "-c",
            CONTAINER,
            "container",
            *environment,
            *command,
        ]

    def _settings(self, container: Container) -> dict[str, str]:
        base = self.folder / f"{container.name}-{container.starts}"
        base.mkdir()
        volumes = [
            (f"{self.folder}/volumes/{mount['name']}", mount["mountPath"], "ro" if mount.get("readOnly") else "rw")
            for mount in container.spec.get("volumeMounts", ())
        ]
        table = base / "mounts"
        table.write_text("".join("\t".join(row) + "\n" for row in mounts_of(self._image, volumes)))
        context = self.spec["securityContext"]
        return {
            "BASE": str(base),
            "MOUNTS": str(table),
            "RESOLVER": str(self.folder.parent / "resolv.conf"),
            "USER_ID": str(context["runAsUser"]),
            "GROUP_ID": str(context["runAsGroup"]),
            "FS_GROUP": str(context["fsGroup"]),
        }

    def _privileges(self) -> list[str]:
        context = self.spec["securityContext"]
        ids = [f"--reuid={context['runAsUser']}", f"--regid={context['runAsGroup']}", f"--groups={context['fsGroup']}"]
        return ["setpriv", *ids, "--no-new-privs", "--inh-caps=-all", "--bounding-set=-all", "--"]

    def _first_process(self, container: Container) -> int:
        assert container.process is not None
        return _child(container.process)


def _child(process: subprocess.Popen[bytes]) -> int:
    """Returns the child of `unshare` or `nsenter`, which fork the first process that is inside. As seen from here."""
    file = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    while not (children := file.read_text().split()) and process.poll() is None:
        time.sleep(0.01)
    return int(children[0])


def mounts_of(image: Image, volumes: Sequence[tuple[str, str, str]]) -> list[tuple[str, str, str]]:
    """All mounts of a container as (source, path in the container, ro or rw), each after those of the folders above."""
    fixed = [(str(place), path, "ro") for path, place in image.folders.items()]
    hidden = {each for each in image.needed for _, path, _ in volumes if each.is_relative_to(path)}
    mounts = [*fixed, *volumes, *((str(each), str(each), "ro") for each in hidden)]
    return sorted(mounts, key=lambda mount: len(mount[1]))


def network() -> None:
    """The bridge between pods. In a network namespace of our own: the machine's is left alone."""
    _run("ip", "link", "set", "lo", "up")
    _run("ip", "link", "add", BRIDGE, "type", "bridge")
    _run("ip", "addr", "add", f"{GATEWAY}/24", "dev", BRIDGE)
    _run("ip", "link", "set", BRIDGE, "up")


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{shlex.join(command)}: {done.stderr.strip()}"
