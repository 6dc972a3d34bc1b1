"""Manifests against our own program: its commands, flags, ports and health services."""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import re
from collections.abc import Iterator
from typing import Any

from tests.deploy.manifests.cluster_files import files_of
from tests.deploy.manifests.objects import Bundle, Complaint, Object, PodTemplate, name_of, namespace_of, where
from tests.deploy.manifests.words import is_image
from tools import cli
from twostroke.base.errors import ConfigError
from twostroke.config import ClusterConfig, RouterCommand, flags
from twostroke.config.settings import Settings

PROGRAM = "twostroke"


_CONFIGS: dict[str, type[Settings]] = {"serve": ClusterConfig, "router": RouterCommand}
"""What is judged together of flags, without a look at files."""
_SHELLS = ("sh", "bash")
_OF_SHELLS = frozenset({"HOME", "HOSTNAME", "PATH", "PWD"})
_SMALL = ("cat", "env", "sleep", "test", "true")
"""Debian's programs that a hook or a probe may want."""
_HEALTH = ("", "live", "ready")
_ADDRESS_FLAGS = ("fleet", "address")
_OF_THE_POD = "10.0.0.1"
"""Stands for what is known in a pod only."""
_PORT_NAMES = {
    "http_port": "http",
    "grpc_port": "grpc",
    "admin_port": "admin",
    "metrics_port": "metrics",
    "peer_port": "peers",
}


def commands_parse(pod: PodTemplate) -> Iterator[Complaint]:
    """Checks containers' commands, and hooks that run the program, with the program's own parser."""
    for path, words, container in runs(pod):
        _args, error = parsed(tuple(_expanded(words, container)))
        if error:
            yield Complaint(pod.where, path, error, f"see `{' '.join(words[:2])} --help`")
    for path, container in pod.containers:
        told = {"command": [*(container.get("command") or [PROGRAM]), *(container.get("args") or [])]}
        for hook, handler in (container.get("lifecycle") or {}).items():
            told[f"lifecycle.{hook}.exec.command"] = ((handler or {}).get("exec") or {}).get("command") or [PROGRAM]
        for place, words in told.items() if _is_ours(container) else ():
            first = str(words[0]).rpartition("/")[2]
            given = words[words.index("-c") + 3 :] if first in _SHELLS and '"$@"' in " ".join(map(str, words)) else []
            for name in (first, *map(str, given[:1])):
                if name not in (PROGRAM, *_SHELLS, *_SMALL):
                    yield Complaint(pod.where, f"{path}.{place}", f"the image has no program {name}", f"use {PROGRAM}")


def variables_are_defined(pod: PodTemplate) -> Iterator[Complaint]:
    """$(NAME) of what the container does not have would reach the program as it stands there."""
    for path, container in pod.containers:
        known = {str(variable.get("name")) for variable in container.get("env") or []}
        words = [str(word) for word in container.get("command") or []]
        script = words[words.index("-c") + 1] if "-c" in words[:-1] and words[0] in _SHELLS else ""
        for name in sorted(set(re.findall(r"\$([A-Z][A-Z0-9_]*)\b", script)) - known - _OF_SHELLS):
            if not container.get("envFrom"):
                yield Complaint(pod.where, f"{path}.command", f"no variable {name}", "add it to the container's env")
        for field in ("command", "args"):
            for index, word in enumerate(container.get(field) or []):
                for name in re.findall(r"(?<!\$)\$\(([A-Za-z_]\w*)\)", str(word)):
                    if name not in known and not container.get("envFrom"):
                        what = f"no variable {name}"
                        yield Complaint(pod.where, f"{path}.{field}[{index}]", what, "add it to the container's env")


def ports_of_flags_are_declared(pod: PodTemplate) -> Iterator[Complaint]:
    """What the program listens on is what the container declares, under the same name."""
    for path, words, container in runs(pod, hooks=False):
        args, _error = parsed(tuple(_expanded(words, container)))
        if args is None:
            continue
        declared = {port.get("name"): port.get("containerPort") for port in container.get("ports") or []}
        for flag, name in _PORT_NAMES.items():
            told = getattr(args, flag, None)
            if (told or (name in declared and args.command == "router")) and declared.get(name) != told:
                what = f"--{flag.replace('_', '-')} is {told}, the container's port {name} is {declared.get(name)}"
                yield Complaint(pod.where, path, what, "make them equal")


def probes_ask_what_is_answered(pod: PodTemplate) -> Iterator[Complaint]:
    """gRPC health is answered on the admin port of a router and on the rpc port of a worker."""
    for path, container in pod.containers:
        answering = {
            port.get("containerPort") for port in container.get("ports") or [] if port.get("name") in ("admin", "rpc")
        }
        for name in ("startupProbe", "readinessProbe", "livenessProbe"):
            probe = container.get(name) or {}
            handler = probe.get("grpc")
            if handler is None:
                continue
            place = f"{path}.{name}.grpc"
            if handler.get("service", "") not in _HEALTH:
                what = f"no health service is named {handler['service']}"
                yield Complaint(pod.where, f"{place}.service", what, 'use "live" or "ready"')
            elif name != "readinessProbe" and handler.get("service", "") in ("", "ready"):
                what = "who is not ready would be killed"
                yield Complaint(pod.where, f"{place}.service", what, "use live")
            if answering and _declared(container, handler.get("port")) and handler.get("port") not in answering:
                what = f"port {handler.get('port')} answers no health of its own"
                yield Complaint(pod.where, f"{place}.port", what, f"use one of {sorted(answering)}")


def graces_cover_the_drain(pod: PodTemplate) -> Iterator[Complaint]:
    """SIGTERM comes after preStop: what the program takes to drain comes on top."""
    grace_s = pod.spec.get("terminationGracePeriodSeconds", 30)
    for path, words, container in runs(pod, hooks=False):
        args, _error = parsed(tuple(_expanded(words, container)))
        own = getattr(args, "grace", None) if args is not None else None
        hook_s = ((container.get("lifecycle") or {}).get("preStop") or {}).get("sleep") or {}
        if own is not None and hook_s.get("seconds", 0) < grace_s <= hook_s.get("seconds", 0) + own:
            what = f"preStop and --grace take {hook_s.get('seconds', 0) + own:g} s, the pod is killed after {grace_s}"
            yield Complaint(pod.where, path, what, "raise terminationGracePeriodSeconds above it")


def drains_end_within_the_grace(pod: PodTemplate) -> Iterator[Complaint]:
    grace_s = pod.spec.get("terminationGracePeriodSeconds", 30)
    for path, words, container in runs(pod):
        if "lifecycle" not in path:
            continue
        args, _error = parsed(tuple(_expanded(words, container)))
        limit_s = next((getattr(args, name) for name in ("deadline", "timeout") if getattr(args, name, None)), None)
        if limit_s is not None and float(limit_s) >= grace_s:
            what = f"the drain may take {limit_s:g} s, the pod is killed after {grace_s}"
            yield Complaint(pod.where, path, what, "raise terminationGracePeriodSeconds above it")


def addresses_lead_to_services(bundle: Bundle) -> Iterator[Complaint]:
    for pod in bundle.pods:
        for path, args, _container in started(pod):
            for flag in _ADDRESS_FLAGS:
                address = getattr(args, flag, None)
                if isinstance(address, str) and ":" in address:
                    wrong = _address_complaint(bundle, pod, address)
                    if wrong:
                        yield Complaint(pod.where, path, f"--{flag} {address}: {wrong}", "name a Service and its port")


def redis_is_reached(bundle: Bundle) -> Iterator[Complaint]:
    for item in bundle.of("RayCluster"):
        address = str((item["spec"].get("gcsFaultToleranceOptions") or {}).get("redisAddress", ""))
        head = next(pod for pod in bundle.pods if pod.where == where(item) and pod.group == "head")
        wrong = _address_complaint(bundle, head, address.rpartition("/")[2]) if ":" in address else ""
        if wrong:
            place = "spec.gcsFaultToleranceOptions.redisAddress"
            yield Complaint(where(item), place, f"{address}: {wrong}", "name a Service and its port")


def routers_serve_the_fleets_model(bundle: Bundle) -> Iterator[Complaint]:
    models = {file.config.model.model: file.config.model.public_name for _, _, file in files_of(bundle)}
    for pod in bundle.pods:
        for path, args, _container in started(pod, hooks=False):
            if args.command != "router" or not models:
                continue
            name = args.served_model_name or args.model
            if args.model not in models:
                what = f"--model {args.model}, and the workers serve {', '.join(models)}"
                yield Complaint(pod.where, path, what, "make them equal")
            elif name != models[args.model]:
                what = f"clients would call the model {name}, by the cluster file {models[args.model]}"
                yield Complaint(pod.where, path, what, "make served_model_name and --served-model-name equal")


def images_are_the_same(bundle: Bundle) -> Iterator[Complaint]:
    """Routers and workers of different builds refuse each other; `latest` is another one tomorrow."""
    ours: dict[str, str] = {}
    for pod in bundle.pods:
        for path, container in pod.containers:
            image = str(container.get("image", ""))
            name, _, tag = image.rpartition("/")[2].partition("@")[0].partition(":")
            if not is_image(image):
                yield Complaint(pod.where, f"{path}.image", f"{image!r} names no image", "write registry/name:tag")
                continue
            if "@" not in image and tag in ("", "latest"):
                yield Complaint(pod.where, f"{path}.image", f"{image} has no tag of its own", "tag it")
            if name.startswith(PROGRAM):
                ours.setdefault(image, f"{pod.where} {path}")
                first = next(iter(ours))
                if image != first:
                    yield Complaint(pod.where, f"{path}.image", f"{image}, elsewhere {first}", "use one image")


@functools.lru_cache(maxsize=1024)
def parsed(words: tuple[str, ...]) -> tuple[argparse.Namespace | None, str]:
    """What the program makes of its arguments (without its own name), or the parser's complaint."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
            args = cli.PROGRAM.parser(words).parse_args(words)
        if args.command in _CONFIGS:
            flags.read(_CONFIGS[args.command], args)
        return args, ""
    except ConfigError as error:
        return None, str(error)
    except SystemExit:
        lines = said.getvalue().strip().splitlines()
        return None, lines[-1] if lines else "asks for help only"


def runs(pod: PodTemplate, hooks: bool = True) -> Iterator[tuple[str, list[str], Object]]:
    """(path, words, container) of everything that starts our program."""
    for path, container in pod.containers:
        told = [*map(str, container.get("command") or []), *map(str, container.get("args") or [])]
        if not container.get("command") and told and _is_ours(container):
            told = [PROGRAM, *told]  # the image's entry point
        for words in _commands(told):
            yield f"{path}.command", words, container
        for hook, handler in (container.get("lifecycle") or {}).items() if hooks else ():
            for words in _commands(list(map(str, ((handler or {}).get("exec") or {}).get("command") or []))):
                yield f"{path}.lifecycle.{hook}.exec.command", words, container


def started(pod: PodTemplate, hooks: bool = True) -> Iterator[tuple[str, argparse.Namespace, Object]]:
    """(path, arguments, container) where they parse."""
    for path, words, container in runs(pod, hooks):
        args, _error = parsed(tuple(_expanded(words, container)))
        if args is not None:
            yield path, args, container


def _commands(words: list[str]) -> Iterator[list[str]]:
    """Those that run our program, of a shell's script too."""
    if words[:1] == [PROGRAM]:
        yield words
    elif words and words[0].rpartition("/")[2] in _SHELLS:
        script, *given = words[words.index("-c") + 1 :] if "-c" in words else words[-1:]
        for part in re.split(r"&&|\|\||[;|&\n]", script):
            inside = part.split()
            if PROGRAM in inside[:2]:
                yield inside[inside.index(PROGRAM) :]
            elif inside == ["exec", '"$@"'] and given[1:2] == [PROGRAM]:
                yield given[1:]


def _is_ours(container: Object) -> bool:
    return str(container.get("image", "")).rpartition("/")[2].partition(":")[0].startswith(PROGRAM)


def _expanded(words: list[str], container: Object) -> list[str]:
    """Without the program's name; variables have their values, or some address where they are known in a pod only."""
    values = {str(one.get("name")): str(one.get("value", _OF_THE_POD)) for one in container.get("env") or []}
    return [re.sub(r"\$\((\w+)\)", lambda found: values.get(found[1], found[0]), word) for word in words[1:]]


def _declared(container: Object, number: Any) -> bool:
    return number in {port.get("containerPort") for port in container.get("ports") or []}


def _address_complaint(bundle: Bundle, pod: PodTemplate, address: str) -> str:
    host, _, port = address.rpartition(":")
    name, _, rest = host.partition(".")
    if host == _OF_THE_POD:
        own = {str(one.get("containerPort")) for _, container in pod.containers for one in container.get("ports") or []}
        return "" if port in own else f"no container of this pod has port {port}"
    if name.isdigit():
        return ""  # an address of IP
    namespace = rest.split(".")[0] or pod.namespace
    for cluster in bundle.of("RayCluster"):
        if name == f"{name_of(cluster)}-head-svc":
            head = next(pod for pod in bundle.pods if pod.where == where(cluster) and pod.group == "head")
            ports = {str(one.get("containerPort")) for _, box in head.containers for one in box.get("ports") or []}
            return "" if port in ports else f"the head has no port {port}"
    service = bundle.find("Service", name, namespace)
    if service is None:
        return f"no Service is named {name}"
    numbers = {str(one.get("port")) for one in service["spec"].get("ports") or []}
    if service["spec"].get("clusterIP") == "None":  # its name leads to pods: no port is translated
        targets = [one.get("targetPort", one.get("port")) for one in service["spec"].get("ports") or []]
        pods = bundle.pods_with(service["spec"].get("selector") or {}, namespace_of(service))
        declared = [one for pod in pods for _, container in pod.containers for one in container.get("ports") or []]
        numbers = {
            str(one["containerPort"]) for one in declared if {one.get("name"), one["containerPort"]} & set(targets)
        }
    return (
        ""
        if port in numbers
        else f"Service {name} leads to no port {port}, but to {', '.join(sorted(numbers)) or 'none'}"
    )
