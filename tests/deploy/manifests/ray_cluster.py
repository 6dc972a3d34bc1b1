"""What KubeRay's operator or Ray would refuse after the API server has said yes."""

from __future__ import annotations

import functools
import importlib.util
import json
import re
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

from tests.deploy.manifests.objects import (
    NODE_TYPE,
    Bundle,
    Complaint,
    Object,
    namespace_of,
    pod_templates,
    redis_clean_up,
    selected,
    where,
)
from tests.deploy.manifests.program import started
from tests.deploy.manifests.words import LABEL, quantity

_GATED = {
    "networkPolicy": "RayClusterNetworkPolicy",
    "tlsOptions": "RayClusterMTLS",
}
"""Fields that need an alpha gate of the operator (KubeRay 1.7)."""
_BY_OPERATOR = frozenset({"head", "address", "block"})
_NUMBERS = frozenset({"num-cpus", "num-gpus", "memory", "object-store-memory", "metrics-export-port", "port"})
_DEVICES = ("nvidia.com/gpu", "amd.com/gpu", "google.com/tpu")
_LEAST_STORE = 75 << 20
"""OBJECT_STORE_MINIMUM_MEMORY_BYTES of Ray."""
_HEAD_PORTS = frozenset({"gcs", "dashboard", "metrics"})


def ray_needs_no_gates(item: Object) -> Iterator[Complaint]:
    if item.get("kind") != "RayCluster":
        return
    spec = item["spec"]
    for field, gate in _GATED.items():
        if spec.get(field) is not None:
            todo = "leave it out; write plain objects (NetworkPolicy, our own TLS)"
            yield Complaint(where(item), f"spec.{field}", f"needs the alpha gate {gate} of the operator", todo)
    storage = spec.get("gcsFaultToleranceOptions") or {}
    if storage.get("backend") == "rocksdb" or storage.get("storage"):
        what = "rocksdb needs the alpha gate GCSFaultToleranceEmbeddedStorage of the operator"
        yield Complaint(where(item), "spec.gcsFaultToleranceOptions", what, "use redisAddress")


def gcs_storage_is_consistent(item: Object) -> Iterator[Complaint]:
    spec = (item.get("spec") or {}) if item.get("kind") == "RayCluster" else {}
    storage = spec.get("gcsFaultToleranceOptions")
    annotations = (item.get("metadata") or {}).get("annotations") or {}
    place = "spec.gcsFaultToleranceOptions"
    if storage is None:
        return
    if storage.get("backend", "redis") == "redis" and not storage.get("redisAddress"):
        yield Complaint(where(item), place, "redis without redisAddress", "name the Redis")
    if storage.get("backend") == "rocksdb" and storage.get("redisAddress"):
        yield Complaint(where(item), place, "both rocksdb and redisAddress", "choose one")
    if annotations.get("ray.io/ft-enabled") == "false":
        yield Complaint(where(item), place, "the annotation ray.io/ft-enabled says false", "leave out one of them")
    for pod in pod_templates(item):
        for path, container in pod.containers:
            for variable in container.get("env") or []:
                if variable.get("name") in ("RAY_REDIS_ADDRESS", "REDIS_PASSWORD"):
                    what = f"{variable['name']} beside gcsFaultToleranceOptions is refused by the operator"
                    yield Complaint(where(item), f"{path}.env", what, "say it in gcsFaultToleranceOptions alone")


def group_sizes_are_ordered(item: Object) -> Iterator[Complaint]:
    for path, group in _groups(item):
        fewest, count, most = (group.get(field) for field in ("minReplicas", "replicas", "maxReplicas"))
        if fewest is not None and most is not None and (fewest > most or fewest < 0):
            what = f"minReplicas {fewest} is above maxReplicas {most}"
            yield Complaint(where(item), f"{path}.minReplicas", what, "order them")
        elif count is not None and not (fewest or 0) <= count <= (count if most is None else most):
            what = f"replicas {count} is outside {fewest} to {most}"
            yield Complaint(where(item), f"{path}.replicas", what, "order them")
        if group.get("numOfHosts", 1) != 1:
            yield Complaint(where(item), f"{path}.numOfHosts", "one worker is one pod here", "leave it out")


def group_names_are_unique(item: Object) -> Iterator[Complaint]:
    seen = set()
    for path, group in _groups(item):
        name = str(group.get("groupName"))
        if name in seen or not LABEL.fullmatch(name):
            yield Complaint(where(item), f"{path}.groupName", f"{name!r} is taken, or no label", "name each once")
        seen.add(name)


def start_params_are_known(item: Object) -> Iterator[Complaint]:
    """KubeRay makes `ray start --KEY=VALUE` of them."""
    for path, group in _all_groups(item):
        for key, value in (group.get("rayStartParams") or {}).items():
            place = f"{path}.rayStartParams.{key}"
            if key == "dashboard-host" and not re.fullmatch(r"[0-9.]+|[0-9a-f:]+|localhost", str(value)):
                yield Complaint(where(item), place, f"{value!r} is not an address", "use 0.0.0.0")
            if key in _BY_OPERATOR:
                yield Complaint(where(item), place, "KubeRay says that itself", "leave it out")
            elif key == "labels":
                yield Complaint(where(item), place, "KubeRay refuses it here", "write them into the group's labels")
            elif key not in start_options():
                yield Complaint(where(item), place, f"`ray start` has no --{key}", f"did you mean {_near(key)}?")
            elif key == "resources" and not is_json_of_ray(str(value)):
                todo = """KubeRay wants JSON in quotes: '"{\\\"accelerator\\\": 1}"'"""
                yield Complaint(where(item), place, f"{value} is no JSON in quotes", todo)
            elif key in _NUMBERS and not re.fullmatch(r"\d+(\.\d+)?", str(value)):
                yield Complaint(where(item), place, f"{value!r} is not a number", 'write digits, quoted: "1"')


def is_json_of_ray(value: str) -> bool:
    """A shell takes the outer quotes off."""
    try:
        return isinstance(json.loads(value.strip("'\"").replace('\\"', '"')), dict)
    except ValueError:
        return False


def start_params_fit_the_pod(item: Object) -> Iterator[Complaint]:
    """Ray must not be told of more than the pod may use."""
    for template in pod_templates(item) if item.get("kind") == "RayCluster" else ():
        group = group_of(item, template.group)
        limits = ((template.spec.get("containers") or [{}])[0].get("resources") or {}).get("limits") or {}
        told = group.get("rayStartParams") or {}
        gpus = sum(int(quantity(limits.get(name, 0)) or 0) for name in _DEVICES)
        path = template.path.removesuffix(".template")
        if "num-gpus" in told and float(told["num-gpus"]) > gpus:
            what = f"Ray is told of {told['num-gpus']} GPUs, the pod has {gpus}"
            yield Complaint(where(item), f"{path}.rayStartParams.num-gpus", what, "leave it out: KubeRay reads limits")
        memory, store = quantity(limits.get("memory", 0)), told.get("object-store-memory")
        if store and store.isdigit() and int(store) < _LEAST_STORE:
            what = f"Ray refuses an object store of {store} bytes"
            place = f"{path}.rayStartParams.object-store-memory"
            yield Complaint(where(item), place, what, f"at least {_LEAST_STORE}")
        if memory and store and store.isdigit() and int(store) >= memory:
            what = f"an object store of {store} bytes in {limits['memory']}"
            yield Complaint(where(item), f"{path}.rayStartParams.object-store-memory", what, "make it smaller")


def autoscaler_is_v2(item: Object) -> Iterator[Complaint]:
    if item.get("kind") != "RayCluster":
        return
    spec = item["spec"]
    options = spec.get("autoscalerOptions")
    scales = spec.get("enableInTreeAutoscaling")
    if options and not scales:
        todo = "set enableInTreeAutoscaling: true, or leave them out"
        yield Complaint(where(item), "spec.autoscalerOptions", "nobody reads them: no autoscaler runs", todo)
    elif scales and (options or {}).get("version") != "v2":
        place = "spec.autoscalerOptions.version"
        yield Complaint(where(item), place, "labels of nodes need autoscaler v2", "set version: v2")
    if scales:
        for template in pod_templates(item):
            if template.spec.get("restartPolicy", "Never") != "Never":
                place = f"{template.path}.spec.restartPolicy"
                yield Complaint(where(item), place, "autoscaler v2 demands Never", "leave it out")
    idle = (options or {}).get("idleTimeoutSeconds")
    if idle is not None and idle <= 0:
        place = "spec.autoscalerOptions.idleTimeoutSeconds"
        yield Complaint(where(item), place, f"after {idle} s every pod would be given back", "write 60 or more")
    for path, group in _groups(item):
        if (group.get("idleTimeoutSeconds") or 1) < 0:
            yield Complaint(where(item), f"{path}.idleTimeoutSeconds", "is negative", "write 60 or more")
        if group.get("idleTimeoutSeconds") is not None and not scales:
            yield Complaint(where(item), f"{path}.idleTimeoutSeconds", "needs autoscaler v2", "leave it out")


def autoscaler_may_speak_with_the_api(bundle: Bundle) -> Iterator[Complaint]:
    """It reads and changes its RayCluster, with the token of the head's account."""
    for item in bundle.of("RayCluster"):
        head = next(pod_templates(item)).spec
        account = bundle.find("ServiceAccount", str(head.get("serviceAccountName")), namespace_of(item)) or {}
        told = head.get("automountServiceAccountToken", account.get("automountServiceAccountToken"))
        if item["spec"].get("enableInTreeAutoscaling") and told is False:
            place = "spec.headGroupSpec.template.spec.automountServiceAccountToken"
            yield Complaint(where(item), place, "the autoscaler beside the head has no token", "set it true")


def ray_version_is_ours(item: Object) -> Iterator[Complaint]:
    if item.get("kind") == "RayCluster" and item["spec"].get("rayVersion") != version("ray"):
        what = f"{item['spec'].get('rayVersion')} is not what the program was tested with"
        yield Complaint(where(item), "spec.rayVersion", what, f"use {version('ray')}, as pyproject.toml")


def ray_demands_a_token(item: Object) -> Iterator[Complaint]:
    if item.get("kind") == "RayCluster":
        options = item["spec"].get("authOptions") or {}
        if options.get("mode") != "token" or not options.get("secretName"):
            what = "whoever reaches Ray's ports could run what he likes"
            yield Complaint(where(item), "spec.authOptions", what, "mode: token and secretName")
        for pod in pod_templates(item):
            for path, container in pod.containers:
                for index, one in enumerate(container.get("env") or []):
                    if one.get("name") == "RAY_AUTH_MODE" and one.get("value") != options.get("mode", "token"):
                        what = f"{one.get('value')!r}, and the cluster's is {options.get('mode')}"
                        yield Complaint(where(item), f"{path}.env[{index}].value", what, "make them equal")


def redis_clean_up_is_apart(bundle: Bundle) -> Iterator[Complaint]:
    """KubeRay's clean-up pod is not a head: nobody is led to it or counts it, and no launcher starts in it."""
    for item in bundle.of("RayCluster"):
        if not item["spec"].get("gcsFaultToleranceOptions"):
            continue
        head = next(pod for pod in bundle.pods if pod.where == where(item) and pod.group == "head")
        pod = redis_clean_up(head)
        todo = f"add {NODE_TYPE}: head, or NotIn [redis-cleanup]"
        for holder, path, selector in _selectors(bundle, head.namespace):
            if selected(selector, pod.labels):
                yield Complaint(where(holder), path, "takes in KubeRay's Redis clean-up pod, too", todo)
        for path, args, container in started(pod, hooks=False):
            if not _waits_in(container, pod.labels[NODE_TYPE]):
                what = f"`twostroke {args.command}` would start in KubeRay's Redis clean-up pod, too"
                todo = 'run it behind `test "$NODE_TYPE" = head || exec sleep infinity`, NODE_TYPE from the label'
                yield Complaint(pod.where, path, what, todo)


def _selectors(bundle: Bundle, namespace: str) -> Iterator[tuple[Object, str, Object]]:
    """(object, path, selector) of what is meant for one kind of pod, in that namespace."""
    for item in bundle.of("Service"):
        if namespace_of(item) == namespace and item["spec"].get("selector"):
            yield item, "spec.selector", {"matchLabels": item["spec"]["selector"]}
    for item in bundle.of("PodDisruptionBudget", "PodMonitor", "InferencePool"):
        if namespace_of(item) == namespace:
            yield item, "spec.selector", item["spec"].get("selector") or {}
    for item in bundle.of("NetworkPolicy"):
        spec = item["spec"]
        if namespace_of(item) == namespace and spec.get("podSelector") and spec.get("ingress"):
            yield item, "spec.podSelector", spec["podSelector"]


def _waits_in(container: Object, node_type: str) -> bool:
    """Its script compares the pod's node type with another one before it runs what it is given."""
    words = [*(container.get("command") or []), *(container.get("args") or [])]
    script = str(words[words.index("-c") + 1]) if "-c" in words[:-1] else ""
    guard = re.match(r'(?:test|\[) "\$(\w+)" = ([\w-]+)(?: \])? \|\| exec sleep infinity;', script)
    if guard is None or guard[2] == node_type:
        return False
    variables = {one.get("name"): one.get("valueFrom") or {} for one in container.get("env") or []}
    field = (variables.get(guard[1], {}).get("fieldRef") or {}).get("fieldPath")
    return bool(field == f"metadata.labels['{NODE_TYPE}']")


def head_ports_are_named(bundle: Bundle) -> Iterator[Complaint]:
    """KubeRay's head Service has the ports that the head's container declares, and no others."""
    for item in bundle.of("RayCluster"):
        head = next(pod_templates(item))
        first = (head.spec.get("containers") or [{}])[0]
        names = {port.get("name"): port.get("containerPort") for port in first.get("ports") or []}
        for name in sorted(_HEAD_PORTS - set(names)):
            yield Complaint(where(item), f"{head.path}.spec.containers[0].ports", f"no port {name}", "declare it")
        for path, group in _all_groups(item):
            box = (((group.get("template") or {}).get("spec") or {}).get("containers") or [{}])[0]
            names = {port.get("name"): port.get("containerPort") for port in box.get("ports") or []}
            told = group.get("rayStartParams") or {}
            for key, name in (("port", "gcs"), ("dashboard-port", "dashboard"), ("metrics-export-port", "metrics")):
                if key in told and name in names and str(names[name]) != str(told[key]):
                    place = f"{path}.rayStartParams.{key}"
                    what = f"{told[key]}, and the container's port {name} is {names[name]}"
                    yield Complaint(where(item), place, what, "make them equal")


@functools.cache
def start_options() -> frozenset[str]:
    """Returns the options of `ray start`, read from Ray's source: importing it takes seconds."""
    spec = importlib.util.find_spec("ray")
    assert spec is not None
    assert spec.origin is not None
    text = (Path(spec.origin).parent / "scripts" / "scripts.py").read_text()
    end = text.index("\ndef start(")
    block = text[text.rindex("@cli.command(", 0, end) : end]
    return frozenset(re.findall(r'"--([a-z][a-z0-9-]+)"', block))


def _groups(item: Object) -> Iterator[tuple[str, Object]]:
    if item.get("kind") == "RayCluster":
        for index, group in enumerate(item["spec"].get("workerGroupSpecs") or []):
            yield f"spec.workerGroupSpecs[{index}]", group


def _all_groups(item: Object) -> Iterator[tuple[str, Object]]:
    if item.get("kind") == "RayCluster":
        yield "spec.headGroupSpec", item["spec"].get("headGroupSpec") or {}
    yield from _groups(item)


def group_of(item: Object, name: str) -> Object:
    groups = {str(group.get("groupName")): group for _, group in _groups(item)}
    return groups.get(name, item["spec"].get("headGroupSpec") or {})


def _near(key: str) -> str:
    import difflib

    return next(iter(difflib.get_close_matches(key, sorted(start_options()), 1)), "another one")
