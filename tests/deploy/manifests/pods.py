"""What an API server demands of a pod beyond its schema, for every template, those of Ray's groups too."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from tests.deploy.manifests.objects import Complaint, Object, PodTemplate
from tests.deploy.manifests.words import LABEL, is_port_name, is_port_number, is_qualified_name, quantity

PROBES = ("startupProbe", "readinessProbe", "livenessProbe")
_PROBE_HANDLERS = frozenset({"exec", "grpc", "httpGet", "tcpSocket"})
_HOOK_HANDLERS = frozenset({"exec", "httpGet", "sleep", "tcpSocket"})
_DEFAULT_GRACE_S = 30
_PLAIN_RESOURCES = frozenset({"cpu", "memory", "ephemeral-storage"})
_LEAST_MEMORY = 1 << 20
_MOST_CPUS = 4096
_SHORTEST_START_S, _SHORTEST_RUN_S = 15, 5


def container_names_are_unique(pod: PodTemplate) -> Iterator[Complaint]:
    seen = set()
    for path, container in pod.containers:
        name = str(container.get("name"))
        if not LABEL.fullmatch(name):
            yield Complaint(pod.where, f"{path}.name", f"{name!r} is no DNS label", "use a-z, 0-9 and -")
        if name in seen:
            yield Complaint(pod.where, f"{path}.name", f"two containers are named {name}", "name each once")
        seen.add(name)


def container_ports_are_valid(pod: PodTemplate) -> Iterator[Complaint]:
    for path, container in pod.containers:
        for index, port in enumerate(container.get("ports") or []):
            place = f"{path}.ports[{index}]"
            if not is_port_number(port.get("containerPort")):
                what = f"{port.get('containerPort')} is not a port"
                yield Complaint(pod.where, f"{place}.containerPort", what, "use 1 to 65535")
            name = port.get("name")
            if name is not None and not is_port_name(name):
                todo = "use at most 15 of a-z, 0-9 and single -, a letter among them"
                yield Complaint(pod.where, f"{place}.name", f"port name {name!r} is not valid", todo)


def container_ports_are_unique(pod: PodTemplate) -> Iterator[Complaint]:
    """A name that two ports of a pod have reaches the first only; a number that two containers have, one of them."""
    names: set[str] = set()
    numbers: set[Any] = set()
    for path, container in pod.containers:
        for index, port in enumerate(container.get("ports") or []):
            name, number = port.get("name"), (port.get("containerPort"), port.get("protocol", "TCP"))
            place = f"{path}.ports[{index}]"
            if name in names:
                yield Complaint(pod.where, f"{place}.name", f"two ports are named {name}", "name each once in the pod")
            if number in numbers:
                what = f"port {number[0]} is declared twice"
                yield Complaint(pod.where, f"{place}.containerPort", what, "declare each once in the pod")
            numbers.add(number)
            names |= {name} if name else set()


def volumes_have_one_source(pod: PodTemplate) -> Iterator[Complaint]:
    seen = set()
    for index, volume in enumerate(pod.spec.get("volumes") or []):
        name, place = str(volume.get("name")), f"{pod.path}.spec.volumes[{index}]"
        sources = sorted(key for key, value in volume.items() if key != "name" and value is not None)
        if len(sources) != 1:
            what = f"volume {name} has {len(sources)} sources {sources}"
            yield Complaint(pod.where, place, what, "give it exactly one (emptyDir: {} where it is a scratch folder)")
        if not LABEL.fullmatch(name) or name in seen:
            yield Complaint(pod.where, f"{place}.name", f"{name!r} is no DNS label, or taken", "name each volume once")
        seen.add(name)


def mounts_have_volumes(pod: PodTemplate) -> Iterator[Complaint]:
    known = {volume.get("name") for volume in pod.spec.get("volumes") or []} | set(pod.claims)
    for path, container in pod.containers:
        for index, mount in enumerate(container.get("volumeMounts") or []):
            if mount.get("name") not in known:
                what = f"no volume is named {mount.get('name')}"
                todo = f"add it to volumes ({', '.join(sorted(map(str, known))) or 'none yet'})"
                yield Complaint(pod.where, f"{path}.volumeMounts[{index}].name", what, todo)


def volumes_are_mounted(pod: PodTemplate) -> Iterator[Complaint]:
    """No API server minds, but whoever wrote the volume wanted it to be seen."""
    mounted = {mount.get("name") for _, container in pod.containers for mount in container.get("volumeMounts") or []}
    for index, volume in enumerate(pod.spec.get("volumes") or []):
        if volume.get("name") not in mounted:
            place, what = f"{pod.path}.spec.volumes[{index}]", f"no container mounts {volume.get('name')}"
            yield Complaint(pod.where, place, what, "mount it or leave it out")
    for name in sorted(set(pod.claims) - mounted):
        yield Complaint(pod.where, "spec.volumeClaimTemplates", f"no container mounts {name}", "mount it")


def mount_paths_are_unique(pod: PodTemplate) -> Iterator[Complaint]:
    for path, container in pod.containers:
        seen = set()
        for index, mount in enumerate(container.get("volumeMounts") or []):
            place, target = f"{path}.volumeMounts[{index}]", str(mount.get("mountPath"))
            if not target.startswith("/") or ":" in target:
                yield Complaint(
                    pod.where, f"{place}.mountPath", f"{target!r} is not an absolute path", "begin it with /"
                )
            if target in seen:
                yield Complaint(pod.where, f"{place}.mountPath", f"{target} is mounted twice", "choose another path")
            sub_path = str(mount.get("subPath", ""))
            if sub_path.startswith("/") or ".." in sub_path.split("/"):
                what = f"{sub_path!r} leaves its volume"
                yield Complaint(pod.where, f"{place}.subPath", what, "use a relative path without ..")
            seen.add(target)


def quantities_are_valid(pod: PodTemplate) -> Iterator[Complaint]:
    for path, container in pod.containers:
        for field, amounts in (container.get("resources") or {}).items():
            for name, amount in amounts.items() if isinstance(amounts, dict) else ():
                place = f"{path}.resources.{field}.{name}"
                known = name in _PLAIN_RESOURCES or name.startswith("hugepages-") or "/" in name
                if not known or not is_qualified_name(name):
                    todo = "use cpu, memory, ephemeral-storage or a device as example.com/name"
                    yield Complaint(pod.where, place, f"{name!r} is not a resource", todo)
                number = quantity(amount)
                if number is None or number < 0:
                    yield Complaint(pod.where, place, f"{amount!r} is not a quantity", "write 500m, 2, 512Mi, 4Gi")
                elif name == "cpu" and number > _MOST_CPUS:
                    yield Complaint(pod.where, place, f"{amount} is {number:g} CPUs", "write 500m, with a small m")
                elif name == "memory" and 0 < number < _LEAST_MEMORY:
                    yield Complaint(pod.where, place, f"{amount} is {number:g} bytes", "write 512Mi, 4Gi")
                elif "/" in name and number != int(number):
                    yield Complaint(pod.where, place, f"{amount!r} of a device", "ask for whole devices")
    for index, volume in enumerate(pod.spec.get("volumes") or []):
        size = (volume.get("emptyDir") or {}).get("sizeLimit", 0)
        room, place = quantity(size), f"{pod.path}.spec.volumes[{index}].emptyDir.sizeLimit"
        if room is None or room < 0:
            yield Complaint(pod.where, place, f"{size!r} is not a quantity", "write 512Mi, 4Gi")
        elif 0 < room < _LEAST_MEMORY:
            yield Complaint(pod.where, place, f"{size} is {room:g} bytes", "write 512Mi, 4Gi")


def requests_are_within_limits(pod: PodTemplate) -> Iterator[Complaint]:
    for path, container in pod.containers:
        resources = container.get("resources") or {}
        requests, limits = resources.get("requests") or {}, resources.get("limits") or {}
        for name in sorted(set(requests) | {name for name in limits if "/" in name}):
            asked, most = quantity(requests.get(name, limits.get(name))), quantity(limits.get(name))
            place = f"{path}.resources.requests.{name}"
            if "/" in name and asked != most:
                what = f"{name} is a device: request {requests.get(name)}, limit {limits.get(name)}"
                yield Complaint(pod.where, place, what, "make limit and request equal")
            elif asked is not None and most is not None and asked > most:
                what = f"request {requests[name]} is above the limit {limits[name]}"
                yield Complaint(pod.where, place, what, "raise the limit or ask for less")


def memory_volumes_fit(pod: PodTemplate) -> Iterator[Complaint]:
    """What is written there counts as the container's memory."""
    sizes = {
        volume.get("name"): quantity((volume.get("emptyDir") or {}).get("sizeLimit"))
        for volume in pod.spec.get("volumes") or []
        if (volume.get("emptyDir") or {}).get("medium") == "Memory"
    }
    for path, container in pod.containers:
        most = quantity(((container.get("resources") or {}).get("limits") or {}).get("memory"))
        for index, mount in enumerate(container.get("volumeMounts") or []):
            size = sizes.get(mount.get("name"))
            if size is not None and most is not None and size > most:
                what = f"volume {mount['name']} in memory may grow beyond the container's limit"
                yield Complaint(pod.where, f"{path}.volumeMounts[{index}]", what, "lower its sizeLimit")


def requests_are_made(pod: PodTemplate) -> Iterator[Complaint]:
    """What asks for nothing is placed anywhere, and is the first to be ended where memory is short."""
    for path, container in pod.containers:
        asked = {**((container.get("resources") or {}).get("limits") or {})}
        asked |= (container.get("resources") or {}).get("requests") or {}
        if "memory" not in asked:
            todo = "say what it needs, for example {cpu: 100m, memory: 256Mi}"
            yield Complaint(pod.where, f"{path}.resources.requests", "no request of memory", todo)


def probes_have_one_handler(pod: PodTemplate) -> Iterator[Complaint]:
    for path, name, probe in _probes(pod):
        handlers = sorted(_PROBE_HANDLERS & {key for key, value in probe.items() if value is not None})
        if len(handlers) != 1:
            todo = f"give it exactly one of {', '.join(sorted(_PROBE_HANDLERS))}"
            yield Complaint(pod.where, f"{path}.{name}", f"{len(handlers)} handlers {handlers}", todo)
    for path, hook, handler in _hooks(pod):
        handlers = sorted(_HOOK_HANDLERS & {key for key, value in handler.items() if value is not None})
        if len(handlers) != 1:
            todo = f"give it exactly one of {', '.join(sorted(_HOOK_HANDLERS))}"
            yield Complaint(pod.where, f"{path}.lifecycle.{hook}", f"{len(handlers)} handlers {handlers}", todo)


def commands_are_given(pod: PodTemplate) -> Iterator[Complaint]:
    told = [(path, name, probe) for path, name, probe in _probes(pod)]
    told += [(path, f"lifecycle.{hook}", handler) for path, hook, handler in _hooks(pod)]
    for path, name, holder in told:
        if holder.get("exec") is not None and not holder["exec"].get("command"):
            yield Complaint(pod.where, f"{path}.{name}.exec.command", "none", "say what is to be run")


def probe_numbers_are_valid(pod: PodTemplate) -> Iterator[Complaint]:
    least = {"initialDelaySeconds": 0, "periodSeconds": 1, "timeoutSeconds": 1, "failureThreshold": 1}
    for path, name, probe in _probes(pod):
        for field, smallest in {**least, "successThreshold": 1, "terminationGracePeriodSeconds": 1}.items():
            value = probe.get(field)
            if value is not None and value < smallest:
                yield Complaint(pod.where, f"{path}.{name}.{field}", f"{value} is too small", f"at least {smallest}")
        if name != "readinessProbe":
            given_s = probe.get("initialDelaySeconds", 0) + probe.get("periodSeconds", 10) * probe.get(
                "failureThreshold", 3
            )
            least_s = _SHORTEST_START_S if name == "startupProbe" else _SHORTEST_RUN_S
            if given_s < least_s:
                what, todo = f"killed unless it answers within {given_s} s", "raise failureThreshold"
                yield Complaint(pod.where, f"{path}.{name}", what, f"{todo}: it may be busy for longer")
        if name != "readinessProbe" and probe.get("successThreshold", 1) != 1:
            what = "only readiness may need several successes"
            yield Complaint(pod.where, f"{path}.{name}.successThreshold", what, "leave it out")
        if name == "readinessProbe" and "terminationGracePeriodSeconds" in probe:
            place, what = f"{path}.{name}.terminationGracePeriodSeconds", "readiness ends no container"
            yield Complaint(pod.where, place, what, "leave it out")


def probe_ports_are_declared(pod: PodTemplate) -> Iterator[Complaint]:
    """A number that no port of the container declares is answered all the same; here it is a slip nearly always."""
    for path, container in pod.containers:
        declared = container.get("ports") or []
        names = {port["name"] for port in declared if "name" in port}
        numbers = {port.get("containerPort") for port in declared}
        for place, handler in _ports_asked(container):
            port = handler.get("port")
            if port not in names and port not in numbers:
                known = ", ".join(sorted(f"{one.get('name', '-')}={one.get('containerPort')}" for one in declared))
                what = f"the container has no port {port}"
                yield Complaint(pod.where, f"{path}.{place}.port", what, f"use one of: {known or 'none declared'}")


def init_containers_end(pod: PodTemplate) -> Iterator[Complaint]:
    for index, container in enumerate(pod.spec.get("initContainers") or []):
        if container.get("restartPolicy") == "Always":
            continue
        for field in ("lifecycle", "livenessProbe", "readinessProbe", "startupProbe"):
            if container.get(field):
                place = f"{pod.path}.spec.initContainers[{index}].{field}"
                todo = "leave it out, or make the container a sidecar with restartPolicy: Always"
                yield Complaint(pod.where, place, "an init container that ends has no such thing", todo)


def environment_is_well_formed(pod: PodTemplate) -> Iterator[Complaint]:
    for path, container in pod.containers:
        seen = set()
        for index, variable in enumerate(container.get("env") or []):
            place, name = f"{path}.env[{index}]", str(variable.get("name"))
            sources = [key for key, value in (variable.get("valueFrom") or {}).items() if value is not None]
            if "valueFrom" in variable and (variable.get("value") or len(sources) != 1):
                what = f"{name} has a value and {len(sources)} sources"
                yield Complaint(pod.where, place, what, "give it a value or exactly one source")
            if "value" not in variable and not sources:
                yield Complaint(pod.where, place, f"{name} has neither a value nor a source", "give it one")
            if not name or "=" in name or name in seen:
                yield Complaint(pod.where, f"{place}.name", f"{name!r} is taken or no name", "set each variable once")
            seen.add(name)


def hooks_end_within_the_grace(pod: PodTemplate) -> Iterator[Complaint]:
    grace = pod.spec.get("terminationGracePeriodSeconds")
    grace_s = _DEFAULT_GRACE_S if grace is None else grace
    if grace_s < 0:
        place = f"{pod.path}.spec.terminationGracePeriodSeconds"
        yield Complaint(pod.where, place, "negative", "give the pod time to drain")
    for path, hook, handler in _hooks(pod):
        if hook == "preStop" and longest_s(handler) >= grace_s:
            what = f"preStop takes up to {longest_s(handler)} s, the pod is killed after {grace_s} s"
            todo = "raise terminationGracePeriodSeconds above it"
            yield Complaint(pod.where, f"{path}.lifecycle.preStop", what, todo)


def longest_s(handler: Object) -> float:
    """Returns how long a hook may take by what it says itself: by sleeping, or by a program's own limit."""
    if handler.get("sleep"):
        return float(handler["sleep"].get("seconds", 0))
    words = " ".join(map(str, (handler.get("exec") or {}).get("command") or [])).replace("=", " ").split()
    limits = [
        after
        for word, after in itertools.pairwise(words)
        if word in ("sleep", "timeout", "--timeout", "--grace", "--wait")
    ]
    return sum(float(limit.rstrip("s;")) for limit in limits if limit.rstrip("s;").replace(".", "", 1).isdigit())


def _probes(pod: PodTemplate) -> Iterator[tuple[str, str, Object]]:
    for path, container in pod.containers:
        for name in PROBES:
            if container.get(name) is not None:
                yield path, name, container[name]


def _hooks(pod: PodTemplate) -> Iterator[tuple[str, str, Object]]:
    for path, container in pod.containers:
        for hook, handler in (container.get("lifecycle") or {}).items():
            if isinstance(handler, dict):
                yield path, hook, handler


def _ports_asked(container: Object) -> Iterator[tuple[str, Object]]:
    for name in PROBES:
        for kind in ("grpc", "httpGet", "tcpSocket"):
            handler = (container.get(name) or {}).get(kind)
            if handler:
                yield f"{name}.{kind}", handler
    for hook, holder in (container.get("lifecycle") or {}).items():
        for kind in ("httpGet", "tcpSocket"):
            if isinstance(holder, dict) and holder.get(kind):
                yield f"lifecycle.{hook}.{kind}", holder[kind]
