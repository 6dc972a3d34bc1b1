"""What `kubectl kustomize` renders, and what ConfigMaps, Secrets and Services in it mean to a pod."""

from __future__ import annotations

import base64
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.deploy.tools import tool

Object = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Manifests:
    objects: tuple[Object, ...]

    @classmethod
    def render(cls, overlay: Path, replaced: Mapping[str, str] | None = None) -> Manifests:
        """`replaced`: text, wherever it is."""
        command = [str(tool("kubectl")), "kustomize", str(overlay)]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        for old, new in (replaced or {}).items():
            text = text.replace(old, new)
        return cls(tuple(yaml.safe_load_all(text)))

    def of_kind(self, kind: str) -> list[Object]:
        return [each for each in self.objects if each["kind"] == kind]

    def named(self, kind: str, name: str) -> Object:
        return next(each for each in self.of_kind(kind) if each["metadata"]["name"] == name)

    def replicas(self, deployment: Object) -> int:
        """Returns the number that its autoscaler wants at least."""
        name = deployment["metadata"]["name"]
        scalers = (each["spec"] for each in self.of_kind("HorizontalPodAutoscaler"))
        return next((int(spec["minReplicas"]) for spec in scalers if spec["scaleTargetRef"]["name"] == name), 1)

    def files(self, volume: Object) -> Mapping[str, bytes] | None:
        """Returns the files of a ConfigMap's or Secret's volume; None for one that begins empty."""
        if "configMap" in volume:
            return {key: text.encode() for key, text in self._config(volume["configMap"]["name"]).items()}
        if "secret" in volume:
            return self._secret(volume["secret"]["secretName"])
        assert "emptyDir" in volume, f"volumes of this kind are not made here: {volume}"
        return None

    def environment(self, container: Object, pod_address: str, labels: Mapping[str, str]) -> dict[str, str]:
        values: dict[str, str] = {}
        for source in container.get("envFrom", ()):
            values |= self._config(source["configMapRef"]["name"])
        for entry in container.get("env", ()):
            values[entry["name"]] = self._value(entry, pod_address, labels)
        return values

    def addresses(self, service: str, pods: Iterable[tuple[Mapping[str, str], str]]) -> list[str] | None:
        """Returns the addresses of a Service, from labels and address of every pod; None if there is no such
        Service."""
        for each in self.of_kind("Service"):
            if each["metadata"]["name"] == service:
                selector = each["spec"]["selector"].items()
                return [address for labels, address in pods if selector <= labels.items()]
        return None

    def _config(self, name: str) -> dict[str, str]:
        return dict(self.named("ConfigMap", name)["data"])

    def _secret(self, name: str) -> dict[str, bytes]:
        return {key: base64.b64decode(value) for key, value in self.named("Secret", name)["data"].items()}

    def _value(self, entry: Object, pod_address: str, labels: Mapping[str, str]) -> str:
        if "value" in entry:
            return str(entry["value"])
        source = entry["valueFrom"]
        if "secretKeyRef" in source:
            return self._secret(source["secretKeyRef"]["name"])[source["secretKeyRef"]["key"]].decode()
        path = source["fieldRef"]["fieldPath"]
        if path.startswith("metadata.labels["):
            return labels[path.split("'")[1]]
        assert path == "status.podIP", f"not known here: {source}"
        return pod_address
