"""Our program in its pods: what it reads, where it listens, what it can open and write, and whom it trusts."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import ipaddress
import mmap
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from tests.deploy.manifests.cluster_files import files_of
from tests.deploy.manifests.gateway import ROUTES, backends, http_paths
from tests.deploy.manifests.objects import Bundle, Complaint, Object, PodTemplate, namespace_of, where
from tests.deploy.manifests.program import started
from tests.deploy.manifests.references import file_complaint
from tests.deploy.manifests.words import quantity

_ROOT = Path(__file__).parents[3]
_SOURCES = ("twostroke", "router", "cluster", "prefill_worker", "decode_worker")
_LOOPBACK = ("127.0.0.1", "localhost", "::1", "[::1]")
_LONG_RUNNING = ("up", "serve", "router")
_SCRATCH = ("HOME", "TMPDIR", "XDG_CACHE_HOME")
_READ_ONLY_SOURCES = frozenset({"configMap", "secret", "projected", "downwardAPI"})
_RAY_TOKENS = frozenset({"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"})
_READ_BY_GROUP, _READ_BY_ALL, _USUAL_MODE, _MOST_MODE = 0o040, 0o004, 0o644, 0o777


def variables_are_read(bundle: Bundle) -> Iterator[Complaint]:
    """A variable of ours or a setting of Ray's that nobody knows changes nothing."""
    for thing, path, name, value in _variables(bundle):
        if name.startswith("TWOSTROKE_") and name not in our_variables():
            what, todo = f"the program reads no {name}", f"use one of: {', '.join(sorted(our_variables()))}"
            yield Complaint(thing, path, what, todo)
        setting = re.fullmatch(r"RAY_([a-z][a-z0-9_]*)", name)
        if setting and not is_setting_of_ray(setting[1]):
            yield Complaint(thing, path, f"Ray reads no {name}", "see ray_config_def.h of Ray for its name")
        elif setting and re.search(r"_(ms|s|threshold|niceness)(_|$)", name) and not re.fullmatch(r"-?\d+", value):
            yield Complaint(thing, path, f"{value!r} is not a number", "write digits, without a unit")


def servers_listen_outside(pod: PodTemplate) -> Iterator[Complaint]:
    for path, args, container in started(pod, hooks=False):
        host = getattr(args, "host", None)
        if host and not _is_address(host.strip("[]")):
            yield Complaint(pod.where, path, f"--host {host} is not an address", "use 0.0.0.0")
        if host in _LOOPBACK and container.get("ports"):
            what = f"--host {args.host}: nobody outside the pod reaches its ports"
            yield Complaint(pod.where, path, what, "use 0.0.0.0")


def launchers_are_sidecars(pod: PodTemplate) -> Iterator[Complaint]:
    for path, args, container in started(pod, hooks=False):
        endless = args.command in _LONG_RUNNING and not getattr(args, "check", False)
        if ".initContainers" in path and endless and container.get("restartPolicy") != "Always":
            place = path.removesuffix(".command")
            what = f"`twostroke {args.command}` does not end: the containers after it would never start"
            yield Complaint(pod.where, f"{place}.restartPolicy", what, "restartPolicy: Always, as a sidecar")


def secrets_are_given(bundle: Bundle) -> Iterator[Complaint]:
    """Routers and workers of different pods have one secret, and Ray's token where Ray demands it."""
    own = {str(file.config.token_file) for _, _, file in files_of(bundle) if file.config.token_file}
    guarded = {where(item) for item in bundle.of("RayCluster") if item["spec"].get("authOptions")}
    for pod in bundle.pods:
        for path, args, container in started(pod, hooks=False):
            known = {str(one["name"]) for one in container.get("env") or [] if one.get("value") or one.get("valueFrom")}
            command = args.command
            told = "TWOSTROKE_TOKEN_FILE" in known or "--token-file" in " ".join(map(str, container.get("args") or []))
            if not (told or (command == "up" and own)) and command in ("router", "up"):
                what = f"`twostroke {command}` is not told the fleet's secret"
                yield Complaint(pod.where, path, what, "set TWOSTROKE_TOKEN_FILE, and mount the Secret")
            joins = command in ("up", "serve") and getattr(args, "address", None)
            if joins and pod.where in guarded and not known & _RAY_TOKENS:
                yield Complaint(pod.where, path, "Ray demands a token that it has not", "set RAY_AUTH_TOKEN_PATH")


def files_can_be_read(pod: PodTemplate) -> Iterator[Complaint]:
    """Files of a Secret belong to root and to fsGroup."""
    context = pod.spec.get("securityContext") or {}
    for index, volume in enumerate(pod.spec.get("volumes") or []):
        for source in ("secret", "configMap", "projected"):
            told = volume.get(source)
            mode = (told or {}).get("defaultMode", _USUAL_MODE)
            if told is None or mode & _READ_BY_ALL or mode > _MOST_MODE or context.get("runAsUser") == 0:
                continue
            if not (mode & _READ_BY_GROUP and context.get("fsGroup") is not None):
                place = f"{pod.path}.spec.volumes[{index}].{source}.defaultMode"
                what = f"mode {mode:04o}: user {context.get('runAsUser', 'of the image')} cannot read it"
                yield Complaint(pod.where, place, what, "use 0440 and an fsGroup")


def scratch_can_be_written(pod: PodTemplate) -> Iterator[Complaint]:
    volumes = {volume.get("name"): volume for volume in pod.spec.get("volumes") or []}
    for path, container in pod.containers:
        if (container.get("securityContext") or {}).get("readOnlyRootFilesystem") is not True:
            continue
        for index, variable in enumerate(container.get("env") or []):
            folder = str(variable.get("value", ""))
            if variable.get("name") not in _SCRATCH or not folder.startswith("/"):
                continue
            mounts = [
                mount
                for mount in container.get("volumeMounts") or []
                if PurePosixPath(folder).is_relative_to(str(mount.get("mountPath")))
            ]
            mount = max(mounts, key=lambda one: len(str(one["mountPath"])), default={})
            fixed = mount.get("readOnly") or set(volumes.get(mount.get("name"), {})) - {"name"} <= _READ_ONLY_SOURCES
            if not mount or fixed:
                what = f"{variable['name']}={folder} cannot be written: the root file system is read-only"
                yield Complaint(pod.where, f"{path}.env[{index}]", what, f"mount an emptyDir at {folder}")


def pages_of_probes_are_served(pod: PodTemplate) -> Iterator[Complaint]:
    """Checks the probes of routers; what serves a worker's metrics answers every path."""
    for path, args, container in started(pod, hooks=False):
        numbers = {one.get("name"): one.get("containerPort") for one in container.get("ports") or []}
        ports = {word for name in ("http", "metrics") for word in (name, numbers.get(name))}
        for name in ("startupProbe", "readinessProbe", "livenessProbe") if args.command == "router" else ():
            handler = (container.get(name) or {}).get("httpGet") or {}
            page = str(handler.get("path", "/")).partition("?")[0]
            if handler and handler.get("port") in ports and page not in http_paths():
                place = f"{path.removesuffix('.command')}.{name}.httpGet.path"
                yield Complaint(pod.where, place, f"no page of the router is at {page}", "use /live or /ready")


def certificates_agree(bundle: Bundle) -> Iterator[Complaint]:
    """Mutual TLS is spoken by all of a cluster or by none."""
    for item, key, file in files_of(bundle):
        secured = file.config.certificates.cluster is not None
        for pod in bundle.pods:
            for path, args, _container in started(pod, hooks=False):
                if args.command == "router" and (args.cluster_tls_cert is not None) != secured:
                    what = f"workers speak {_speech(secured)} by data.{key} of {where(item)}, the router does not"
                    yield Complaint(pod.where, path, what, "give both security.cluster_tls_* and --cluster-tls-*")


def probes_speak_as_their_port(bundle: Bundle) -> Iterator[Complaint]:
    """The kubelet's gRPC probes speak no TLS."""
    secured = any(file.config.certificates.cluster is not None for _, _, file in files_of(bundle))
    for pod in bundle.pods:
        for path, container in pod.containers:
            rpc = {one.get("containerPort") for one in container.get("ports") or [] if one.get("name") == "rpc"}
            for name in ("startupProbe", "readinessProbe", "livenessProbe"):
                handler = (container.get(name) or {}).get("grpc") or {}
                if secured and handler.get("port") in rpc:
                    what = "workers speak TLS there, the kubelet's probe does not"
                    yield Complaint(pod.where, f"{path}.{name}.grpc", what, "ask for /metrics at worker-metrics")


def gateways_speak_as_routers(bundle: Bundle) -> Iterator[Complaint]:
    """A gateway that ends TLS speaks plainly with its backends, unless a BackendTLSPolicy tells it otherwise."""
    for item in bundle.of(*ROUTES) if not bundle.of("BackendTLSPolicy") else ():
        for path, reference in backends(item):
            service = bundle.find("Service", str(reference.get("name")), namespace_of(item)) or {}
            selector = (service.get("spec") or {}).get("selector")
            for pod in bundle.pods_with(selector, namespace_of(item)) if selector else ():
                for _path, args, _container in started(pod, hooks=False):
                    if getattr(args, "tls_cert", None):
                        what = f"{pod.where} takes TLS alone (--tls-cert), the gateway speaks plainly"
                        yield Complaint(where(item), path, what, "leave out --tls-cert, or add a BackendTLSPolicy")


def models_are_mounted(bundle: Bundle) -> Iterator[Complaint]:
    for pod in bundle.pods:
        for path, args, container in started(pod, hooks=False):
            models = [file.config.model.model for _, _, file in files_of(bundle)] if args.command == "up" else []
            for model in models or [getattr(args, "model", None)]:
                yield from _unmounted(bundle, pod, container, path, model)
        for item, key, file in files_of(bundle) if pod.owner == "RayCluster" and pod.group != "head" else ():
            container = (pod.spec.get("containers") or [{}])[0]
            for one in _unmounted(bundle, pod, container, f"data.{key}: model.model", file.config.model.model):
                what = f"{one.what}, on pods of group {pod.group}"
                yield Complaint(where(item), one.path, what, one.todo)


def memory_has_room_for_pages(bundle: Bundle) -> Iterator[Complaint]:
    for item, key, file in files_of(bundle):
        for pod in bundle.pods:
            limits = ((pod.spec.get("containers") or [{}])[0].get("resources") or {}).get("limits") or {}
            most, pages = quantity(limits.get("memory")), file.config.cache.kv_cache_memory_bytes
            is_worker = pod.owner == "RayCluster" and pod.group != "head"
            if is_worker and pages and most and file.config.model.device == "cpu" and pages >= most:
                what = f"{pages} bytes of pages, a pod of group {pod.group} has {limits['memory']}"
                yield Complaint(where(item), f"data.{key}: cache.kv_cache_memory", what, "ask for less")


@functools.cache
def our_variables() -> frozenset[str]:
    texts = [file.read_text() for name in _SOURCES for file in (_ROOT / name).rglob("*.py")]
    return frozenset(found for text in texts for found in re.findall(r"\bTWOSTROKE_[A-Z_]+", text))


@functools.cache
def is_setting_of_ray(name: str) -> bool:
    """Its raylet has the names of all settings in it, as text."""
    spec = importlib.util.find_spec("ray")
    assert spec is not None
    assert spec.origin is not None
    binary = Path(spec.origin).parent / "core" / "src" / "ray" / "raylet" / "raylet"
    with binary.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
        return text.find(b"\0" + name.encode() + b"\0") >= 0


def _variables(bundle: Bundle) -> Iterator[tuple[str, str, str, str]]:
    """(object, path, name, value) of what containers are given, from ConfigMaps too."""
    for pod in bundle.pods:
        for path, container in pod.containers:
            for index, variable in enumerate(container.get("env") or []):
                if "value" in variable:
                    yield pod.where, f"{path}.env[{index}]", str(variable.get("name")), str(variable["value"])
            for source in container.get("envFrom") or []:
                name = str((source.get("configMapRef") or {}).get("name"))
                item = bundle.find("ConfigMap", name, pod.namespace)
                for key, value in ((item or {}).get("data") or {}).items():
                    yield where(item or {}), f"data.{key}", str(source.get("prefix", "")) + key, str(value)


def _unmounted(
    bundle: Bundle, pod: PodTemplate, container: Object, path: str, model: str | None
) -> Iterator[Complaint]:
    wrong = file_complaint(bundle, pod, container, model) if model and model.startswith("/") else None
    if wrong is not None:
        yield Complaint(pod.where, path, f"model {model}: {wrong[0]}", wrong[1])


def _is_address(text: str) -> bool:
    with contextlib.suppress(ValueError):
        return text == "localhost" or bool(ipaddress.ip_address(text))
    return False


def _speech(secured: bool) -> str:
    return "mutual TLS" if secured else "plainly"
