"""The pods that KubeRay 1.7 makes of a RayCluster: Ray's command in the first container, and what it adds there."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from tests.trials.chaos.pods.manifests import Object

GCS_PORT = 6379


def head_service(cluster: Object) -> Object:
    """The head's Service, which no manifest has."""
    name = cluster["metadata"]["name"]
    labels = {"ray.io/cluster": name, "ray.io/node-type": "head"}
    return {"kind": "Service", "metadata": {"name": f"{name}-head-svc"}, "spec": {"selector": labels}}


def pods(cluster: Object) -> Iterator[tuple[str, dict[str, Any]]]:
    """Name and template of each pod that there is at first."""
    name = cluster["metadata"]["name"]
    head = cluster["spec"]["headGroupSpec"]
    yield f"{name}-head", _pod(cluster, head, "head", ["ray", "start", "--head", "--dashboard-agent-listen-port=52365"])
    for group in cluster["spec"]["workerGroupSpecs"]:
        start = ["ray", "start", f"--address={name}-head-svc:{GCS_PORT}"]
        for number in range(group["replicas"]):
            yield f"{name}-{group['groupName']}-{number}", _pod(cluster, group, "worker", start)


def _pod(cluster: Object, group: Object, kind: str, start: list[str]) -> dict[str, Any]:
    template: dict[str, Any] = copy.deepcopy(group["template"])
    name = cluster["metadata"]["name"]
    own = {"ray.io/cluster": name, "ray.io/node-type": kind, "ray.io/group": group.get("groupName", "headgroup")}
    template["metadata"]["labels"] = {**template["metadata"]["labels"], **group.get("labels", {}), **own}
    container = template["spec"]["containers"][0]
    parameters = {
        "metrics-export-port": "8080",
        **group["rayStartParams"],
        "labels": ",".join(f"{key}={value}" for key, value in group.get("labels", {}).items()),
    }
    flags = [f"--{key}={value}" for key, value in parameters.items()]
    # As KubeRay's: a shell, which is why the image needs one.
    container["command"] = ["/bin/bash", "-c", "--"]
    container["args"] = ["ulimit -n 65536; " + " ".join([*start, "--block", *flags])]
    container["env"] = [*container.get("env", ()), *_environment(cluster, kind)]
    return template


def _environment(cluster: Object, kind: str) -> list[Mapping[str, Any]]:
    service = f"{cluster['metadata']['name']}-head-svc"
    head = "127.0.0.1" if kind == "head" else service
    secret = {"name": cluster["spec"]["authOptions"]["secretName"], "key": "auth_token"}
    return [
        {"name": "RAY_CLUSTER_NAME", "value": cluster["metadata"]["name"]},
        {"name": "RAY_PORT", "value": str(GCS_PORT)},
        {"name": "RAY_ADDRESS", "value": f"{head}:{GCS_PORT}"},
        {"name": "RAY_AUTH_MODE", "value": cluster["spec"]["authOptions"]["mode"]},
        {"name": "RAY_AUTH_TOKEN", "valueFrom": {"secretKeyRef": secret}},
    ]
