"""Monitors find what they scrape, rules and triggers ask for metrics that there are, in PromQL that parses."""

from __future__ import annotations

import functools
import json
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import yaml

from tests.deploy.manifests.objects import Bundle, Complaint, Object, namespace_of, selected, where
from tests.deploy.tools import find_tool

METRIC_NAMES = Path(__file__).parents[1] / "metric_names.txt"
"""The metrics of a real router and real workers; test_scrape.py holds the file against them."""
RULES = Path(__file__).parents[3] / "deploy" / "observability" / "prometheus" / "rules.yml"
_FOREIGN = ("ray_", "kube_", "container_", "node_", "process_", "python_")
"""Metrics of Ray, Kubernetes and client libraries."""
_KNOWN = frozenset({"up", "scrape_duration_seconds", "ALERTS", "ALERTS_FOR_STATE", "vector", "time"})
_LABELS_OF_TARGETS = frozenset({"container", "endpoint", "instance", "job", "namespace", "node", "pod", "service"})
_ROLES = frozenset({"router", "prefill", "decode"})
_WORDS = frozenset({
    "and", "or", "unless", "bool", "offset", "inf", "nan", "by", "without", "on", "ignoring", "group_left",
    "group_right", "start", "end", "atan2",
})  # fmt: skip
_TRIGGER_NEEDS = {
    "prometheus": ("serverAddress", "query", "threshold"),
    "cpu": ("value",),
    "memory": ("value",),
    "cron": ("timezone", "start", "end", "desiredReplicas"),
    "metrics-api": ("url", "valueLocation", "targetValue"),
}
PATIENCE_S = 60


def monitors_find_their_targets(bundle: Bundle) -> Iterator[Complaint]:
    for item in bundle.of("ServiceMonitor"):
        services = [
            service
            for service in bundle.of("Service")
            if _covers(item, service)
            and selected(item["spec"].get("selector"), service.get("metadata", {}).get("labels") or {})
        ]
        if not services:
            yield Complaint(where(item), "spec.selector", "selects no Service", "use labels that a Service itself has")
        for index, endpoint in enumerate(item["spec"].get("endpoints") or []):
            names = {port.get("name") for service in services for port in service["spec"].get("ports") or []}
            if services and endpoint.get("port") not in names and "targetPort" not in endpoint:
                known = ", ".join(sorted(str(name) for name in names))
                what = f"no selected Service has a port named {endpoint.get('port')}"
                yield Complaint(where(item), f"spec.endpoints[{index}].port", what, f"use one of: {known}")
    for item in bundle.of("PodMonitor"):
        pods = [pod for pod in bundle.pods if selected(item["spec"].get("selector"), pod.labels)]
        pods = [pod for pod in pods if _covers(item, {"metadata": {"namespace": pod.namespace}})]
        if not pods:
            yield Complaint(where(item), "spec.selector", "selects no pod", "use labels of the pods")
        names = {str(one["port"]) for one in item["spec"].get("podMetricsEndpoints") or [] if one.get("port")}
        for pod in pods if names else []:
            own = {str(port.get("name")) for _, container in pod.containers for port in container.get("ports") or []}
            if not names & own:
                what = f"pods of {pod.where} {pod.group} have none of its ports"
                yield Complaint(where(item), "spec.podMetricsEndpoints", what, f"use one of: {', '.join(sorted(own))}")
        for index, endpoint in enumerate(item["spec"].get("podMetricsEndpoints") or []):
            ports = [port for pod in pods for _, container in pod.containers for port in container.get("ports") or []]
            number = endpoint.get("portNumber")
            if number is not None and pods and number not in {port.get("containerPort") for port in ports}:
                what = f"no selected pod has port {number}"
                yield Complaint(where(item), f"spec.podMetricsEndpoints[{index}].portNumber", what, "name the port")
            if "port" in endpoint and pods and endpoint["port"] not in {port.get("name") for port in ports}:
                known = ", ".join(sorted({str(port.get("name")) for port in ports}))
                what = f"no selected pod has a port named {endpoint['port']}"
                yield Complaint(where(item), f"spec.podMetricsEndpoints[{index}].port", what, f"use one of: {known}")


def monitored_ports_serve_metrics(bundle: Bundle) -> Iterator[Complaint]:
    """Ports that answer /metrics are named so; a monitor of another one scrapes errors."""
    for item in bundle.of("ServiceMonitor", "PodMonitor"):
        field = "endpoints" if item["kind"] == "ServiceMonitor" else "podMetricsEndpoints"
        for index, endpoint in enumerate(item["spec"].get(field) or []):
            place, port, path = f"spec.{field}[{index}]", endpoint.get("port"), endpoint.get("path", "/metrics")
            if port is not None and "metrics" not in str(port):
                yield Complaint(where(item), f"{place}.port", f"port {port} has no metrics", "use a metrics port")
            if path != "/metrics":
                yield Complaint(where(item), f"{place}.path", f"{path} is not served", "use /metrics")


def scrapes_can_succeed(item: Object) -> Iterator[Complaint]:
    field = {"ServiceMonitor": "endpoints", "PodMonitor": "podMetricsEndpoints"}.get(str(item.get("kind")))
    if field and not item["spec"].get(field):
        yield Complaint(where(item), f"spec.{field}", "none: nothing would be scraped", "name the port")
    for index, endpoint in enumerate(item["spec"].get(field) or [] if field else []):
        place = f"spec.{field}[{index}]"
        interval, timeout = endpoint.get("interval"), endpoint.get("scrapeTimeout")
        if interval and timeout and _seconds(timeout) > _seconds(interval):
            what = f"{timeout} is longer than the interval of {interval}"
            yield Complaint(where(item), f"{place}.scrapeTimeout", what, "make it shorter: the operator refuses it")
        if not any(endpoint.get(one) for one in ("port", "portNumber", "targetPort")):
            yield Complaint(where(item), f"{place}.port", "none", "name the port that has metrics")
        if endpoint.get("scheme") in ("https", "HTTPS") and not endpoint.get("tlsConfig"):
            yield Complaint(where(item), f"{place}.scheme", "metrics are served without TLS", "leave it out")


def rules_have_actions(item: Object) -> Iterator[Complaint]:
    for path, rule in _rules(item):
        if not _is_one(rule):
            yield Complaint(where(item), path, "neither or both of alert and record", "give exactly one")
        elif rule.get("alert"):
            for annotation in ("summary", "action"):
                if not (rule.get("annotations") or {}).get(annotation):
                    place, what = f"{path}.annotations.{annotation}", f"{rule['alert']} has none"
                    yield Complaint(where(item), place, what, "say what is wrong, and what to do")


def queries_parse(bundle: Bundle) -> Iterator[Complaint]:
    asked = [(thing, path, text) for thing, path, text in queries(bundle)]
    wrong = _errors_of_promtool(tuple(text for _, _, text in asked))
    for (thing, path, _), error in zip(asked, wrong, strict=True):
        if error:
            yield Complaint(thing, path, error, "correct the PromQL")


def rules_are_taken(bundle: Bundle) -> Iterator[Complaint]:
    """Names, templates and what rules may not have twice, as Prometheus reads them; queries were parsed already."""
    for item in bundle.of("PrometheusRule"):
        groups = [
            {**group, "rules": [{**rule, "expr": "vector(1)"} for rule in group.get("rules") or [] if _is_one(rule)]}
            for group in item["spec"].get("groups") or []
        ]
        for error in _errors_of_groups(json.dumps(groups)):
            yield Complaint(where(item), "spec.groups", error, "correct the rule: Prometheus refuses the whole file")


def queries_name_metrics_that_there_are(bundle: Bundle) -> Iterator[Complaint]:
    recorded = {rule["record"] for item in bundle.objects for _, rule in _rules(item) if rule.get("record")}
    known = metric_labels().keys() | recorded | _KNOWN
    asked = list(queries(bundle))
    wrong = _errors_of_promtool(tuple(text for _, _, text in asked))
    for (thing, path, text), error in zip(asked, wrong, strict=True):
        for name in sorted(metrics_in(text) - known) if not error else ():
            if not name.startswith(_FOREIGN):
                yield Complaint(thing, path, f"no process has a metric {name}", f"did you mean {_near(name, known)}?")


def queries_match_labels_that_there_are(bundle: Bundle) -> Iterator[Complaint]:
    for thing, path, text in queries(bundle):
        for name, label, value in matchers_in(text):
            known = metric_labels().get(name)
            if known and label not in known | _LABELS_OF_TARGETS:
                what, todo = f"{name} has no label {label}", f"use one of: {', '.join(sorted(known))}"
                yield Complaint(thing, path, what, todo)
            elif label == "role" and value and not set(value.split("|")) <= _ROLES:
                what = f"nobody has role {value}"
                yield Complaint(thing, path, what, f"use one of: {', '.join(sorted(_ROLES))}")


def triggers_are_complete(item: Object) -> Iterator[Complaint]:
    if item.get("kind") != "ScaledObject":
        return
    triggers = item["spec"].get("triggers") or []
    if not triggers:
        yield Complaint(where(item), "spec.triggers", "none", "give at least one")
    for index, trigger in enumerate(triggers):
        place, kind, told = f"spec.triggers[{index}]", str(trigger.get("type")), trigger.get("metadata") or {}
        if kind not in _TRIGGER_NEEDS:
            todo = f"use one of: {', '.join(sorted(_TRIGGER_NEEDS))}"
            yield Complaint(where(item), f"{place}.type", f"trigger {kind!r} is not known", todo)
            continue
        if trigger.get("metricType") == "Utilization" and kind not in ("cpu", "memory"):
            what = f"Utilization is of cpu and memory, not of {kind}"
            yield Complaint(where(item), f"{place}.metricType", what, "use AverageValue")
        for field in _TRIGGER_NEEDS[kind]:
            if not told.get(field):
                yield Complaint(where(item), f"{place}.metadata.{field}", "is missing", f"{kind} needs it")
        for field in ("threshold", "activationThreshold", "value"):
            number = re.fullmatch(r"\d+(\.\d+)?", str(told.get(field, 1)))
            if not number or (field == "threshold" and float(number[0]) == 0):
                what = f"{told[field]!r} is not a number above 0"
                yield Complaint(where(item), f"{place}.metadata.{field}", what, "write 0.8")
        yield from _prometheus_complaints(item, f"{place}.metadata", told if kind == "prometheus" else {})
    names = [trigger["name"] for trigger in triggers if trigger.get("name")]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield Complaint(where(item), "spec.triggers", f"two triggers are named {name}", "name each once")


def _prometheus_complaints(item: Object, place: str, told: Object) -> Iterator[Complaint]:
    address, query = told.get("serverAddress"), str(told.get("query") or "")
    if address and not re.fullmatch(r"https?://[^/:]+(:\d+)?(/.*)?", str(address)):
        yield Complaint(where(item), f"{place}.serverAddress", f"{address} is no URL", "write http://HOST:PORT")
    if re.fullmatch(r"\s*[a-zA-Z_:][\w:]*\s*(\{.*\})?\s*", query):
        what = "as many numbers as there are processes, and KEDA takes one"
        yield Complaint(where(item), f"{place}.query", what, "wrap it: sum(...), max(...)")


def triggers_may_authenticate(bundle: Bundle) -> Iterator[Complaint]:
    for item in bundle.of("ScaledObject"):
        for index, trigger in enumerate(item["spec"].get("triggers") or []):
            reference = trigger.get("authenticationRef") or {}
            kind = reference.get("kind", "TriggerAuthentication")
            if reference and bundle.find(kind, str(reference.get("name")), namespace_of(item)) is None:
                place = f"spec.triggers[{index}].authenticationRef"
                yield Complaint(where(item), place, f"no {kind} is named {reference.get('name')}", "name one")


def queries(bundle: Bundle) -> Iterator[tuple[str, str, str]]:
    """(object, path, PromQL) of rules, triggers and dashboards."""
    for item in bundle.objects:
        for path, rule in _rules(item):
            yield where(item), f"{path}.expr", str(rule.get("expr", ""))
        if item.get("kind") == "ScaledObject":
            for index, trigger in enumerate(item["spec"].get("triggers") or []):
                query = (trigger.get("metadata") or {}).get("query")
                if trigger.get("type") == "prometheus" and query:
                    yield where(item), f"spec.triggers[{index}].metadata.query", str(query)
        for key, panel in _panels(item):
            for target in panel.get("targets") or []:
                if target.get("expr"):
                    yield where(item), f"data.{key}: panel {panel.get('title')!r}", _without_variables(target["expr"])
        for key, name, series in _listed(item):
            yield where(item), f"data.{key}: variable {name}", _without_variables(series)


@functools.cache
def _groups_written() -> dict[str, Object]:
    return {group["name"]: group for group in yaml.load(RULES.read_text(), Loader=yaml.CSafeLoader)["groups"]}


def dashboards_can_be_read(item: Object) -> Iterator[Complaint]:
    for key, text in _dashboards(item):
        try:
            model = json.loads(text)
        except ValueError as error:
            yield Complaint(where(item), f"data.{key}", f"is no JSON: {error}", "write it by generate.py")
            continue
        if not isinstance(model, dict) or not model.get("title") or not model.get("panels"):
            yield Complaint(where(item), f"data.{key}", "is not a dashboard", "give it a title and panels")


def _dashboards(item: Object) -> Iterator[tuple[str, str]]:
    """Yields the dashboards, found by the label that Grafana's sidecar looks for."""
    if item.get("kind") == "ConfigMap" and "grafana_dashboard" in ((item.get("metadata") or {}).get("labels") or {}):
        yield from ((key, text) for key, text in (item.get("data") or {}).items() if key.endswith(".json"))


def _panels(item: Object) -> Iterator[tuple[str, Object]]:
    """Rows have panels of their own."""
    for key, text in _dashboards(item):
        for panel in _model(text).get("panels") or []:
            yield from ((key, one) for one in (panel, *(panel.get("panels") or [])))


def _listed(item: Object) -> Iterator[tuple[str, str, str]]:
    """(dashboard, variable, series whose labels are its values)."""
    for key, text in _dashboards(item):
        for variable in (_model(text).get("templating") or {}).get("list") or []:
            asked = variable.get("query")
            query = asked.get("query") if isinstance(asked, dict) else asked
            matched = re.fullmatch(r"\s*label_values\((.+),\s*\w+\)\s*", str(query))
            if variable.get("type") == "query" and matched:
                yield key, str(variable.get("name")), matched[1]


@functools.lru_cache(maxsize=64)
def _model(text: str) -> Object:
    try:
        model = json.loads(text)
    except ValueError:
        return {}  # said by dashboards_can_be_read
    return model if isinstance(model, dict) else {}


def _without_variables(query: str) -> str:
    return re.sub(r"\$\{?\w+\}?", ".*", re.sub(r"\$__\w+", "5m", query))


def _seconds(text: str) -> float:
    units = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
    return sum(float(number) * units[unit] for number, unit in re.findall(r"(\d+)(ms|s|m|h|d)", text))


@functools.cache
def metric_labels() -> dict[str, frozenset[str]]:
    """Labels by series; none where the scrape had no sample to show them."""
    lines = METRIC_NAMES.read_text().split() if METRIC_NAMES.is_file() else []
    parts = [line.rstrip("}").partition("{") for line in lines]
    return {name: frozenset(filter(None, labels.split(","))) for name, _, labels in parts}


def metrics_in(query: str) -> set[str]:
    """Names of metrics in PromQL that parses."""
    bare = re.sub(r'"(?:\\.|[^"\\])*"|\'(?:\\.|[^\'\\])*\'|`[^`]*`', "", query)
    bare = re.sub(r"#.*", "", bare)
    bare = re.sub(r"\{[^}]*\}|\[[^\]]*\]", " ", bare)
    bare = re.sub(r"\b(by|without|on|ignoring|group_left|group_right)\s*\([^)]*\)", " ", bare)
    bare = re.sub(r"\boffset\s+-?[0-9a-z]+|@\s*[0-9.]+", " ", bare)
    found = re.findall(r"(?<![\w:.])([a-zA-Z_:][\w:]*)(?!\w|\s*\()", bare)
    return {name for name in found if name.lower() not in _WORDS}


def matchers_in(query: str) -> Iterator[tuple[str, str, str]]:
    """(metric, label, value) of all that select series."""
    for name, inside in re.findall(r'([a-zA-Z_:][\w:]*)\s*\{((?:[^}"]|"[^"]*")*)\}', query):
        for label, value in re.findall(r'(\w+)\s*(?:=~|!~|!=|=)\s*"([^"]*)"', inside):
            yield name, label, value


@functools.lru_cache(maxsize=256)
def _errors_of_promtool(texts: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the error of each query, empty if it parses. Without promtool nothing is said (its test is skipped,
    loudly)."""
    promtool = find_tool("promtool")
    if promtool is None or not texts:
        return ("",) * len(texts)
    rules = [{"record": f"q:{index}", "expr": text} for index, text in enumerate(texts)]
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        json.dump({"groups": [{"name": "queries", "rules": rules}]}, file)
        file.flush()
        command = [promtool, "check", "rules", "--lint=none", file.name]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    if done.returncode == 0:
        return ("",) * len(texts)
    said = done.stdout + done.stderr
    errors = {
        int(number): " ".join(error.split())[:200] for number, error in re.findall(r'rule \d+, "q:(\d+)": (.*)', said)
    }
    return tuple(errors.get(index, "") for index in range(len(texts)))


def _is_one(rule: Object) -> bool:
    return bool(rule.get("alert")) != bool(rule.get("record"))


@functools.lru_cache(maxsize=256)
def _errors_of_groups(groups: str) -> tuple[str, ...]:
    promtool = find_tool("promtool")
    if promtool is None:
        return ()
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(f'{{"groups": {groups}}}')
        file.flush()
        command = [promtool, "check", "rules", "--lint=none", file.name]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    said = (done.stdout + done.stderr).replace(file.name, "").splitlines() if done.returncode else []
    return tuple(
        dict.fromkeys(
            re.sub(r"^[\d: ]+", "", " ".join(line.split())) for line in said if re.search(r"group|rule", line)
        )
    )


def _rules(item: Object) -> Iterator[tuple[str, Object]]:
    if item.get("kind") == "PrometheusRule":
        for index, group in enumerate(item["spec"].get("groups") or []):
            for number, rule in enumerate(group.get("rules") or []):
                yield f"spec.groups[{index}].rules[{number}]", rule


def _covers(monitor: Object, target: Object) -> bool:
    told = monitor["spec"].get("namespaceSelector") or {}
    names = told.get("matchNames") or [namespace_of(monitor)]
    return bool(told.get("any")) or namespace_of(target) in names


def _near(name: str, known: frozenset[str] | set[str]) -> str:
    import difflib

    return next(iter(difflib.get_close_matches(name, sorted(known), 1, 0.3)), "another one")


def rules_file_agrees(bundle: Bundle) -> Iterator[Complaint]:
    """Alerts are written once, in deploy/observability; the PrometheusRule has the same groups."""
    written = _groups_written()
    carried = [
        item
        for item in bundle.of("PrometheusRule")
        if any(group.get("name") in written for group in item["spec"].get("groups") or [])
    ]
    missing = set(written)
    for item in carried:
        for index, group in enumerate(item["spec"].get("groups") or []):
            missing.discard(group.get("name"))
            if group.get("name") in written and group != written[group["name"]]:
                place, what = f"spec.groups[{index}]", f"{group['name']} differs from {RULES.name}"
                yield Complaint(where(item), place, what, "write it there, and take it over")
    for name in sorted(missing) if carried else ():
        what = f"group {name} of {RULES.name} is not here"
        yield Complaint(where(carried[0]), "spec.groups", what, "take it over")
