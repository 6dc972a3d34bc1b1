"""Cluster files in ConfigMaps: they load, and the pods of the groups are what they ask for."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import re
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

from cluster.file.cluster import ClusterFile
from cluster.file.cluster import load as load_cluster_file
from tests.deploy.manifests.objects import Bundle, Complaint, Object, PodTemplate, where
from tests.deploy.manifests.references import file_complaint
from tests.deploy.manifests.words import quantity
from twostroke.base.errors import ConfigError

_WORKER_GROUPS = ("prefill", "decode")


def cluster_files_load(bundle: Bundle) -> Iterator[Complaint]:
    for item, key in cluster_files_of(bundle):
        _file, error = loaded(item["data"][key])
        if error:
            yield Complaint(where(item), f"data.{key}", error, "see `twostroke up --check`")


def cluster_files_fit_the_pods(bundle: Bundle) -> Iterator[Complaint]:
    """Ports, labels, counts and resources of the workers are those of the groups that shall hold them."""
    for item, key in cluster_files_of(bundle):
        file, _error = loaded(item["data"][key])
        for cluster in bundle.of("RayCluster") if file is not None else ():
            assert file is not None
            for path, what, todo in _misfits(file, bundle, cluster):
                yield Complaint(where(item), f"data.{key}: {path}", what, todo)


def files_of_cluster_files_are_mounted(bundle: Bundle) -> Iterator[Complaint]:
    """Certificates and keys that the cluster file names have to be there on workers' nodes too."""
    for item, key in cluster_files_of(bundle):
        for file in sorted(set(re.findall(r"/etc/twostroke/[\w./-]+", item["data"][key]))):
            for pod in bundle.pods:
                boxes = (pod.spec.get("containers") or [{}])[:1]
                boxes += [box for box in pod.spec.get("initContainers") or [] if "up" in _words(box)]
                for container in boxes if pod.owner == "RayCluster" else ():
                    wrong = file_complaint(bundle, pod, container, file)
                    if wrong:
                        what = f"{file}, in {container.get('name')} of group {pod.group}: {wrong[0]}"
                        yield Complaint(where(item), f"data.{key}", what, wrong[1])


def _words(container: Object) -> list[str]:
    return [*(container.get("command") or []), *(container.get("args") or [])]


@functools.lru_cache(maxsize=64)
def loaded(text: str) -> tuple[ClusterFile | None, str]:
    try:
        return load_cluster_file(text, "cluster.yaml"), ""
    except ConfigError as error:
        return None, str(error)


def cluster_files_of(bundle: Bundle) -> Iterator[tuple[Object, str]]:
    for item in bundle.of("ConfigMap"):
        for key in item.get("data") or {}:
            if key == "cluster.yaml":
                yield item, key


def files_of(bundle: Bundle) -> Iterator[tuple[Object, str, ClusterFile]]:
    """Those that load."""
    for item, key in cluster_files_of(bundle):
        file, _error = loaded(item["data"][key])
        if file is not None:
            yield item, key, file


def _misfits(file: ClusterFile, bundle: Bundle, cluster: Object) -> Iterator[tuple[str, str, str]]:
    config = file.config
    ports = {"rpc": config.ports.rpc, "pages": config.ports.pages, "metrics": config.ports.metrics}
    pods = {pod.group: pod for pod in bundle.pods if pod.where == where(cluster)}
    head = {
        port.get("name"): port.get("containerPort")
        for _, one in pods["head"].containers
        for port in one.get("ports") or []
    }
    if config.fleet_port != head.get("fleet"):
        yield "fleet.port", f"{config.fleet_port}, the head's port fleet is {head.get('fleet')}", "make them equal"
    groups = cluster["spec"].get("workerGroupSpecs") or []
    for role in _WORKER_GROUPS:
        wanted = getattr(config, f"{role}_role")
        fitting = [
            group
            for group in groups
            if all((group.get("labels") or {}).get(key) == value for key, value in wanted.labels.items())
        ]
        count = getattr(config, role)
        if count and not fitting:
            known = [group.get("labels") for group in groups]
            yield f"{role}.labels", f"{dict(wanted.labels)} are of no worker group", f"groups have {known}"
            continue
        most = sum(group.get("maxReplicas", group.get("replicas", 0)) for group in fitting)
        if count > most:
            yield f"{role}.count", f"{count} workers, the groups hold {most} pods", "one worker per pod"
        wished = getattr(config.scaling, f"max_{role}") or 0
        if wished > most >= count:
            yield f"scaling.max_{role}", f"{wished} workers, the groups hold {most} pods", "raise maxReplicas"
        for group in fitting:
            yield from _misfits_of_group(role, wanted, ports, pods[str(group.get("groupName"))], group)


def _misfits_of_group(
    role: str, wanted: Any, ports: dict[str, int], pod: PodTemplate, group: Object
) -> Iterator[tuple[str, str, str]]:
    names = {"rpc": "rpc", "pages": "pages", "metrics": "worker-metrics"}
    declared = {
        port.get("name"): port.get("containerPort") for _, one in pod.containers for port in one.get("ports") or []
    }
    for key, number in ports.items():
        if number and declared.get(names[key]) != number:
            what = f"{number}, group {pod.group} has {declared.get(names[key])} as port {names[key]}"
            yield f"ports.{key}", what, "make them equal"
    told = group.get("rayStartParams") or {}
    cpus = quantity(told.get("num-cpus"))
    if cpus is not None and cpus < (wanted.num_cpus or 0):
        what = f"{wanted.num_cpus:g}, a pod of group {pod.group} has {cpus} for Ray"
        yield f"{role}.resources.num_cpus", what, "ask for no more"
    for name in sorted(set(wanted.custom) - set(_custom_resources(told))):
        what = f"no pod of group {pod.group} has {name}"
        yield f"{role}.resources.{name}", what, "num_cpus, num_gpus, memory, or what rayStartParams.resources names"
    limits = ((pod.spec.get("containers") or [{}])[0].get("resources") or {}).get("limits") or {}
    gpus = quantity(told.get("num-gpus", limits.get("nvidia.com/gpu", 0))) or 0
    room = _room(cpus, pod, wanted, gpus)
    if any(ports.values()) and room > 1:
        what = f"a pod of group {pod.group} has room for {room} workers, and ports for one"
        yield f"{role}.resources", what, 'num-cpus: "1" in its rayStartParams, and num_cpus: 1 here'
    if (wanted.num_gpus or 0) > gpus:
        what = f"{wanted.num_gpus:g}, a pod of group {pod.group} has {gpus:g}"
        yield f"{role}.resources.num_gpus", what, "add nvidia.com/gpu to its limits"


def _room(cpus: Decimal | None, pod: PodTemplate, wanted: Any, gpus: Decimal | int) -> int:
    """Returns the CPUs or GPUs that Ray is told. If nothing tells Ray, KubeRay does: the container's limit or request,
    rounded up."""
    resources = ((pod.spec.get("containers") or [{}])[0].get("resources")) or {}
    told = (resources.get("limits") or {}).get("cpu") or (resources.get("requests") or {}).get("cpu")
    has = cpus if cpus is not None else Decimal(math.ceil(quantity(told) or 0))
    shares = [has / Decimal(str(wanted.num_cpus))] if wanted.num_cpus else []
    shares += [Decimal(gpus) / Decimal(str(wanted.num_gpus))] if wanted.num_gpus else []
    return int(min(shares)) if shares else 1


def _custom_resources(start_params: Object) -> list[str]:
    """KubeRay wants them as JSON, in quotes of a shell's."""
    with contextlib.suppress(ValueError):
        return list(json.loads(str(start_params.get("resources", "{}")).strip("'\"").replace('\\"', '"')))
    return []
