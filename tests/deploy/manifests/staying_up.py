"""What our pods need to be taken in, left alone and let go in time, and to keep what is theirs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import PurePosixPath

from tests.deploy.manifests.cluster_files import files_of
from tests.deploy.manifests.objects import (
    Bundle,
    Complaint,
    Object,
    PodTemplate,
    namespace_of,
    pod_templates,
    where,
)
from tests.deploy.manifests.program import started
from tests.deploy.manifests.ray_cluster import group_of
from tests.deploy.manifests.words import quantity

_PROBES = ("startupProbe", "readinessProbe", "livenessProbe")
_SETTING = re.compile(r"RAY_[a-z][a-z0-9_]*")
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
        if fleet and pod.owner == "RayCluster" and pod.group != "head" and not container.get("readinessProbe"):
            place, what = (
                f"{pod.path}.spec.containers[0].readinessProbe",
                "none but KubeRay's, of Ray's node",
            )
            yield Complaint(pod.where, place, what, "grpc: {port: 50052, service: ready}")
        is_worker = fleet and pod.owner == "RayCluster" and pod.group != "head"
        if is_worker and not (container.get("lifecycle") or {}).get("preStop"):
            place = f"{pod.path}.spec.containers[0].lifecycle.preStop"
            yield Complaint(
                pod.where, place, "none: its answers break off", "exec: [twostroke, drain, --node=here, ...]"
            )


def launchers_join_their_pod(pod: PodTemplate) -> Iterator[Complaint]:
    """A launcher is a driver of the Ray node beside it: same files, same memory, processes that it can see."""
    for path, args, container in started(pod, hooks=False):
        place = path.removesuffix(".command")
        if args.command != "up" or pod.owner != "RayCluster" or ".initContainers" not in path:
            continue
        if not getattr(args, "address", None):
            yield Complaint(pod.where, path, "it would start a Ray of its own", "--address=$(POD_IP):6379")
        if not args.keep:
            yield Complaint(pod.where, path, "each new start would end the workers", "add --keep")
        if not pod.spec.get("shareProcessNamespace"):
            what = "the launcher does not see the processes of Ray's node"
            yield Complaint(pod.where, f"{pod.path}.spec.shareProcessNamespace", what, "set it true")
        beside = (pod.spec.get("containers") or [{}])[0]
        for folder in ("/tmp/ray", "/dev/shm"):
            own, its = volume_at(container, folder), volume_at(beside, folder)
            if own != its:
                what = f"{folder} is {own or 'its own'}, and {its or 'its own'} in {beside.get('name')}"
                yield Complaint(pod.where, f"{place}.volumeMounts", what, "mount the same volume in both")


def object_stores_fit_shared_memory(item: Object) -> Iterator[Complaint]:
    """Ray keeps objects on disk where they do not fit, and says so in a log alone. Where nothing is mounted, KubeRay
    mounts as much as the pod has memory."""
    for pod in pod_templates(item) if item.get("kind") == "RayCluster" else ():
        mounted = volume_at((pod.spec.get("containers") or [{}])[0], "/dev/shm")
        for index, volume in enumerate(pod.spec.get("volumes") or []):
            directory = volume.get("emptyDir")
            if volume.get("name") != mounted or directory is None:
                continue
            place = f"{pod.path}.spec.volumes[{index}].emptyDir"
            if directory.get("medium") != "Memory":
                yield Complaint(where(item), f"{place}.medium", "/dev/shm is on disk", "medium: Memory")
            room = quantity(directory.get("sizeLimit"))
            store = str((group_of(item, pod.group).get("rayStartParams") or {}).get("object-store-memory", ""))
            if room is not None and store.isdigit() and int(store) > room:
                what = f"an object store of {store} bytes in {directory['sizeLimit']} of shared memory"
                yield Complaint(where(item), f"{place}.sizeLimit", what, "make it larger than object-store-memory")


def volume_at(container: Object, folder: str) -> str:
    mounts = [
        mount
        for mount in container.get("volumeMounts") or []
        if PurePosixPath(folder).is_relative_to(str(mount.get("mountPath")))
    ]
    return str(max(mounts, key=lambda one: len(str(one["mountPath"])), default={}).get("name", ""))


def secrets_are_used(bundle: Bundle) -> Iterator[Complaint]:
    """A mount of ours that no flag, variable or cluster file names: what it guards is open."""
    told = " ".join(text for item in bundle.of("ConfigMap") for text in map(str, (item.get("data") or {}).values()))
    for pod in bundle.pods:
        for path, container in pod.containers:
            words = [*(container.get("command") or []), *(container.get("args") or [])]
            words += [one.get("value") for one in container.get("env") or []]
            named = " ".join(map(str, words)) + (told if pod.owner == "RayCluster" else "")
            for index, mount in enumerate(container.get("volumeMounts") or []):
                folder = str(mount.get("mountPath"))
                if folder.startswith("/etc/twostroke/") and f"{folder.rstrip('/')}" not in named:
                    what = f"nothing names a file below {folder}"
                    yield Complaint(pod.where, f"{path}.volumeMounts[{index}]", what, "add the flag, or leave it out")


def settings_of_ray_agree(bundle: Bundle) -> Iterator[Complaint]:
    """All of a cluster's processes have to read the same."""
    for item in bundle.of("RayCluster"):
        first: tuple[str, dict[str, str]] | None = None
        for pod in bundle.pods:
            for path, container in pod.containers if pod.where == where(item) else ():
                if path.startswith("spec.autoscalerOptions"):
                    continue
                settings = {
                    name: value for name, value in _variables(bundle, pod, container) if _SETTING.fullmatch(name)
                }
                first = first or (path, settings)
                if settings != first[1]:
                    names = ", ".join(sorted({name for name, _ in settings.items() ^ first[1].items()}))
                    what = f"{names}: not as in {first[0]}"
                    yield Complaint(pod.where, f"{path}.env", what, "envFrom the same ConfigMap in all of them")


def homes_are_told(bundle: Bundle) -> Iterator[Complaint]:
    """Without HOME it is the image's, on a root that is read-only."""
    fleet = any(True for _ in files_of(bundle))
    for pod in bundle.pods:
        ours = {id(container) for _, _, container in started(pod, hooks=False)}
        for path, container in pod.containers:
            fixed = (container.get("securityContext") or {}).get("readOnlyRootFilesystem") is True
            known = {one.get("name") for one in container.get("env") or []}
            if fixed and "HOME" not in known and (id(container) in ours or (fleet and pod.owner == "RayCluster")):
                yield Complaint(pod.where, f"{path}.env", "HOME is that of the image, read-only", "HOME: /tmp")


def _variables(bundle: Bundle, pod: PodTemplate, container: Object) -> Iterator[tuple[str, str]]:
    for source in container.get("envFrom") or []:
        item = bundle.find("ConfigMap", str((source.get("configMapRef") or {}).get("name")), pod.namespace)
        yield from ((str(key), str(value)) for key, value in ((item or {}).get("data") or {}).items())
    yield from ((str(one.get("name")), str(one.get("value", ""))) for one in container.get("env") or [])


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


def redis_remembers(bundle: Bundle) -> Iterator[Complaint]:
    """Its password is known, and it is one: several without replication would each remember a part."""
    for item in bundle.of("RayCluster"):
        options = item["spec"].get("gcsFaultToleranceOptions") or {}
        name = str(options.get("redisAddress", "")).rpartition("/")[2].rpartition(":")[0].partition(".")[0]
        service = bundle.find("Service", name, namespace_of(item)) or {}
        pods = bundle.pods_with((service.get("spec") or {}).get("selector") or {"": ""}, namespace_of(item))
        told = options.get("redisPassword") or {}
        guarded = any(
            (one.get("valueFrom") or {}).get("secretKeyRef")
            for pod in pods
            for _, box in pod.containers
            for one in box.get("env") or []
        )
        if guarded and not (told.get("value") or told.get("valueFrom")):
            place, what = "spec.gcsFaultToleranceOptions.redisPassword", f"none, and {name} asks for one"
            yield Complaint(where(item), place, what, "valueFrom: {secretKeyRef: ...}")
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
