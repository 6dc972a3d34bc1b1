"""Starts pods, asks their probes, restarts what ends, runs preStop and ends them within their grace period."""

from __future__ import annotations

import contextlib
import signal
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.trials.chaos.pods import kuberay
from tests.trials.chaos.pods.manifests import Manifests, Object
from tests.trials.chaos.pods.names import DOMAIN, Names
from tests.trials.chaos.pods.pod import GATEWAY, SUBNET, Container, Image, Pod

LOOK_S = 0.2
PROBE_S = 4.0
HEAD_S = 240.0
RAY_IS_UP = "Ray runtime started."


class Kubelet:
    """All pods of one overlay, on one node."""

    def __init__(self, manifests: Manifests, image: Image, folder: Path) -> None:
        cluster = manifests.of_kind("RayCluster")[0]
        self._manifests = Manifests((*manifests.objects, kuberay.head_service(cluster)))
        self._image = image
        self._folder = folder
        self._addresses = iter(range(2, 250))
        self.pods: dict[str, Pod] = {}
        templates = dict(kuberay.pods(cluster))
        for deployment in manifests.of_kind("Deployment"):
            for number in range(manifests.replicas(deployment)):
                templates[f"{deployment['metadata']['name']}-{number}"] = deployment["spec"]["template"]
        self._templates = templates
        (folder / "resolv.conf").write_text(f"nameserver {GATEWAY}\nsearch {DOMAIN}\noptions ndots:5\n")
        Names(GATEWAY, self._lookup)

    def start(self) -> None:
        """Workers once the head takes them: until then KubeRay's init container holds them back."""
        head, *others = self._templates
        started = self.create(head).log_of("ray-head")
        self.until(lambda: started.exists() and RAY_IS_UP in started.read_text(), "Ray's head is up", HEAD_S)
        for name in others:
            self.create(name)

    def create(self, name: str, template_of: str | None = None) -> Pod:
        template = self._templates[template_of or name]
        pod = Pod(name, template, f"{SUBNET}.{next(self._addresses)}", self._manifests, self._image, self._folder)
        pod.prepare()
        self.pods[name] = pod
        for container in pod.containers:
            pod.start(container)
        return pod

    def keep(self) -> None:
        """Starts again what has ended, as a container's restart policy says; a sidecar's is always."""
        for pod in self.pods.values():
            for container in pod.containers:
                if not container.is_running:
                    pod.start(container)

    def is_ready(self, pod: Pod) -> bool:
        probes = [(container, container.spec["readinessProbe"]) for container in _probed(pod)]
        return all(answers(pod, probe) for _, probe in probes)

    def until(self, is_so: Callable[[], bool], what: str, within_s: float) -> float:
        """Seconds that it took."""
        began_s = time.monotonic()
        while not is_so():
            assert time.monotonic() < began_s + within_s, f"not within {within_s:.0f} s: {what}\n{self.logs()}"
            self.keep()
            time.sleep(LOOK_S)
        return time.monotonic() - began_s

    def delete(self, name: str) -> tuple[float, list[str]]:
        """Seconds until the pod had ended by itself, and what its preStop said. Raises where it had to be killed."""
        pod = self.pods.pop(name)
        began_s = time.monotonic()
        grace_s = float(pod.spec["terminationGracePeriodSeconds"])
        said: list[str] = []
        for container in reversed(pod.containers):  # sidecars end after the others
            said += _stopped(pod, container, began_s + grace_s)
        return time.monotonic() - began_s, said

    def logs(self, lines: int = 12) -> str:
        text = []
        for file in sorted(self._folder.glob("*/*.log")):
            tail = file.read_text(errors="replace").splitlines()[-lines:]
            text.append("\n".join([f"--- {file.parent.name}/{file.name}", *tail]))
        return "\n".join(text)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        try:
            self.start()
            yield
        finally:
            for pod in self.pods.values():
                for container in pod.containers:
                    if container.process is not None:
                        container.process.kill()
                        container.process.wait()

    def _lookup(self, service: str) -> list[str] | None:
        return self._manifests.addresses(service, [(pod.labels, pod.address) for pod in tuple(self.pods.values())])


def answers(pod: Pod, probe: Object) -> bool:
    if "grpc" in probe:
        return _serves(f"{pod.address}:{probe['grpc']['port']}", probe["grpc"].get("service", ""))
    assert "httpGet" in probe, f"not known here: {probe}"
    try:
        url = f"http://{pod.address}:{probe['httpGet']['port']}{probe['httpGet']['path']}"
        with urllib.request.urlopen(url, timeout=PROBE_S) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def _serves(address: str, service: str) -> bool:
    with grpc.insecure_channel(address) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(service=service), timeout=PROBE_S
            )
        except grpc.RpcError:
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def _probed(pod: Pod) -> list[Container]:
    return [container for container in pod.containers if "readinessProbe" in container.spec]


def _stopped(pod: Pod, container: Container, until_s: float) -> list[str]:
    hook = container.spec.get("lifecycle", {}).get("preStop", {})
    said: list[str] = []
    if "sleep" in hook:
        time.sleep(hook["sleep"]["seconds"])
    if "exec" in hook and container.is_running:
        done = pod.execute(container, hook["exec"]["command"], until_s - time.monotonic())
        said.append(f"{container.name}: {done.returncode} {done.stdout.strip()} {done.stderr.strip()[-500:]}")
    pod.signal(container, signal.SIGTERM)
    assert container.process is not None
    container.process.wait(until_s - time.monotonic())  # raises TimeoutExpired: then Kubernetes would have killed it
    return said
