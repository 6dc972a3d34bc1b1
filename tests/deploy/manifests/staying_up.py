"""What our pods need to be taken in, left alone and let go in time, and to keep what is theirs."""

from __future__ import annotations

import re
from collections.abc import Iterator

from tests.deploy.manifests.cluster_files import files_of
from tests.deploy.manifests.objects import Bundle, Complaint, PodTemplate, namespace_of, where
from tests.deploy.manifests.program import started

_PROBES = ("startupProbe", "readinessProbe", "livenessProbe")
_SECRET_NAMES = re.compile(r"(?!RAY_AUTH_MODE)\w*(PASSWORD|PASSWD|SECRET|TOKEN|API_KEY|REDISCLI_AUTH)")


def routers_are_probed(pod: PodTemplate) -> Iterator[Complaint]:
    for path, args, container in started(pod, hooks=False):
        for name in _PROBES if args.command == "router" else ():
            if not container.get(name):
                place = f"{path.removesuffix('.command')}.{name}"
                yield Complaint(pod.where, place, "none", "grpc: {port: 50055, service: live or ready}")


def probes_ask_this_pod(pod: PodTemplate) -> Iterator[Complaint]:
    for path, container in pod.containers:
        secured = "--tls-cert" in " ".join(map(str, container.get("args") or []))
        ours = any(one is container for _, _, one in started(pod, hooks=False))
        for name in _PROBES:
            handler = (container.get(name) or {}).get("httpGet") or {}
            if handler.get("host"):
                what = f"{handler['host']} is asked, by the node"
                yield Complaint(pod.where, f"{path}.{name}.httpGet.host", what, "leave it out: the pod is asked then")
            if ours and handler.get("scheme") == "HTTPS" and not secured:
                place = f"{path}.{name}.httpGet.scheme"
                yield Complaint(pod.where, place, "the program speaks plainly there", "leave it out")


def services_lead_to_ready_pods(bundle: Bundle) -> Iterator[Complaint]:
    """Without a readiness probe a pod is sent requests before it can answer. KubeRay gives its containers their own."""
    for item in bundle.of("Service"):
        selector = item["spec"].get("selector")
        for pod in bundle.pods_with(selector, namespace_of(item)) if selector else ():
            containers = [container for path, container in pod.containers if ".containers[" in path]
            probed = any(container.get("readinessProbe") for container in containers)
            ours = any(args.command == "router" for _, args, _ in started(pod, hooks=False))
            if pod.owner in ("Deployment", "StatefulSet", "DaemonSet") and not probed and not ours:
                what = f"{where(item)} leads here, and nothing says when it can answer"
                yield Complaint(pod.where, f"{pod.path}.spec.containers", what, "add a readinessProbe")


def pods_are_let_go(bundle: Bundle) -> Iterator[Complaint]:
    """Routers wait until nobody sends requests any more, workers hand over what they have."""
    fleet = any(True for _ in files_of(bundle))
    for pod in bundle.pods:
        for path, args, container in started(pod, hooks=False):
            if args.command == "router" and not (container.get("lifecycle") or {}).get("preStop"):
                place = f"{path.removesuffix('.command')}.lifecycle.preStop"
                yield Complaint(pod.where, place, "none: clients are still sent here", "sleep: {seconds: 5}")
        container = (pod.spec.get("containers") or [{}])[0]
        is_worker = fleet and pod.owner == "RayCluster" and pod.group != "head"
        if is_worker and not (container.get("lifecycle") or {}).get("preStop"):
            place = f"{pod.path}.spec.containers[0].lifecycle.preStop"
            yield Complaint(
                pod.where, place, "none: its answers break off", "exec: [twostroke, drain, --node=here, ...]"
            )


def volumes_can_be_written(pod: PodTemplate) -> Iterator[Complaint]:
    """A fresh volume belongs to root, and to fsGroup where there is one."""
    context = pod.spec.get("securityContext") or {}
    claimed = {
        volume.get("name")
        for volume in pod.spec.get("volumes") or []
        if (volume.get("persistentVolumeClaim") or {"readOnly": True}).get("readOnly") is not True
    }
    for path, container in pod.containers:
        own = container.get("securityContext") or {}
        user = own.get("runAsUser", context.get("runAsUser"))
        for index, mount in enumerate(container.get("volumeMounts") or []):
            writes = mount.get("name") in claimed | set(pod.claims) and not mount.get("readOnly")
            if writes and user and context.get("fsGroup") is None:
                what = f"user {user} cannot write into {mount['name']}"
                yield Complaint(pod.where, f"{path}.volumeMounts[{index}]", what, "set securityContext.fsGroup")


def secrets_are_no_text(pod: PodTemplate) -> Iterator[Complaint]:
    for path, container in pod.containers:
        for index, variable in enumerate(container.get("env") or []):
            name, value = str(variable.get("name")), str(variable.get("value") or "")
            if _SECRET_NAMES.fullmatch(name) and value and not value.startswith(("/", "$(")):
                what = f"whoever may read this object reads {name}"
                yield Complaint(pod.where, f"{path}.env[{index}]", what, "valueFrom: {secretKeyRef: ...}")


def redis_is_one(bundle: Bundle) -> Iterator[Complaint]:
    """Several without replication would each remember a part."""
    for item in bundle.of("RayCluster"):
        address = str((item["spec"].get("gcsFaultToleranceOptions") or {}).get("redisAddress", ""))
        name = address.rpartition("/")[2].rpartition(":")[0].partition(".")[0]
        service = bundle.find("Service", name, namespace_of(item)) or {}
        pods = bundle.pods_with((service.get("spec") or {}).get("selector") or {"": ""}, namespace_of(item))
        count = sum(pod.replicas for pod in pods)
        if count > 1:
            what = f"{name} leads to {count} pods, each with a memory of its own"
            yield Complaint(where(item), "spec.gcsFaultToleranceOptions.redisAddress", what, "keep one of them")


def routers_are_counted_once(bundle: Bundle) -> Iterator[Complaint]:
    routers = [pod for pod in bundle.pods for _, args, _ in started(pod, hooks=False) if args.command == "router"]
    for item, key, file in files_of(bundle):
        if routers and file.config.routers:
            what = f"{file.config.routers} beside the launcher, which no Service leads to, and {routers[0].where}"
            yield Complaint(where(item), f"data.{key}: routers.count", what, "write 0: they run elsewhere")
