"""Rendered objects, how they are found, and every pod that would come of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

Object = dict[str, Any]
CLUSTER_KINDS = frozenset({
    "Namespace", "ClusterRole", "ClusterRoleBinding", "PersistentVolume", "StorageClass", "PriorityClass",
    "CustomResourceDefinition", "GatewayClass", "RuntimeClass", "ClusterIssuer",
})  # fmt: skip
"""Kinds that live in no namespace."""
NAMESPACE_LABEL = "kubernetes.io/metadata.name"
"""What every namespace has; its value is the name."""


NODE_TYPE = "ray.io/node-type"
"""The label by which KubeRay tells heads, workers and its Redis clean-up pods apart."""


class Complaint(NamedTuple):
    """What one check says of one object."""

    where: str
    """Kind/name."""
    path: str
    what: str
    todo: str


@dataclass(frozen=True, slots=True, order=True)
class Finding:
    check: str
    where: str
    path: str
    what: str
    todo: str

    def __str__(self) -> str:
        return f"{self.where}: {self.path or '.'}: {self.what}: {self.todo} [{self.check}]"


class PodTemplate(NamedTuple):
    where: str
    path: str
    namespace: str
    labels: dict[str, str]
    """The labels that the pods will carry, including those that KubeRay adds."""
    spec: Object
    metadata: Object
    replicas: int
    """The fewest there may be of them."""
    owner: str
    """Kind of the object."""
    group: str = ""
    """The group of a RayCluster: "head" or the worker group's name."""
    claims: tuple[str, ...] = ()
    """Volumes that a StatefulSet makes for each pod."""
    added: tuple[tuple[str, Object], ...] = ()
    """(path, container) that an operator puts beside them."""

    @property
    def containers(self) -> list[tuple[str, Object]]:
        """(path, container), init containers too."""
        told = [
            (f"{self.path}.spec.{field}[{index}]", container)
            for field in ("initContainers", "containers")
            for index, container in enumerate(self.spec.get(field) or [])
        ]
        return [*told, *self.added]


class Bundle:
    """All objects that are applied together."""

    def __init__(self, objects: list[Object]) -> None:
        self.objects = objects
        self.pods = [self._scaled(template) for item in objects for template in _templates_of(item)]

    def of(self, *kinds: str) -> list[Object]:
        return [item for item in self.objects if item.get("kind") in kinds]

    def find(self, kind: str, name: str, namespace: str) -> Object | None:
        for item in self.of(kind):
            if name_of(item) == name and namespace in ("", namespace_of(item)):
                return item
        return None

    def _scaled(self, pod: PodTemplate) -> PodTemplate:
        """An autoscaler decides how many there are at least, whatever the object says."""
        for item in self.of("HorizontalPodAutoscaler", "ScaledObject"):
            spec = item["spec"] if isinstance(item.get("spec"), dict) else {}
            target = spec.get("scaleTargetRef")
            if isinstance(target, dict) and f"{target.get('kind', 'Deployment')}/{target.get('name')}" == pod.where:
                fewest = spec.get("minReplicas", spec.get("minReplicaCount", 0))
                return pod._replace(replicas=fewest) if isinstance(fewest, int) else pod
        return pod

    def pods_with(self, labels: dict[str, str], namespace: str) -> list[PodTemplate]:
        return [pod for pod in self.pods if pod.namespace == namespace and matches(labels, pod.labels)]


def cluster_of(service: Object) -> Object:
    """The RayCluster that KubeRay makes of a RayService."""
    spec = (service.get("spec") or {}).get("rayClusterConfig") or {}
    return {"apiVersion": "ray.io/v1", "kind": "RayCluster", "metadata": service["metadata"], "spec": spec}


def name_of(item: Object) -> str:
    return str((item.get("metadata") or {}).get("name", ""))


def namespace_of(item: Object) -> str:
    return str((item.get("metadata") or {}).get("namespace", ""))


def where(item: Object) -> str:
    return f"{item.get('kind', '?')}/{name_of(item)}"


def matches(selector: dict[str, str], labels: dict[str, str]) -> bool:
    return all(labels.get(key) == value for key, value in selector.items())


def selected(selector: Object | None, labels: dict[str, str]) -> bool:
    """A LabelSelector: an empty one selects everything, none at all selects nothing."""
    if selector is None:
        return False
    return matches(selector.get("matchLabels") or {}, labels) and all(
        _meets(expression, labels) for expression in selector.get("matchExpressions") or []
    )


def _meets(expression: Object, labels: dict[str, str]) -> bool:
    value = labels.get(expression.get("key", ""))
    values = expression.get("values") or []
    tests: dict[str, Callable[[], bool]] = {
        "In": lambda: value in values,
        "NotIn": lambda: value not in values,
        "Exists": lambda: value is not None,
        "DoesNotExist": lambda: value is None,
    }
    return tests.get(str(expression.get("operator")), lambda: False)()


def pod_templates(item: Object) -> Iterator[PodTemplate]:
    kind, spec = item.get("kind"), item.get("spec") or {}
    if kind == "Pod":
        yield _template(item, "", item, 1)
    elif kind in ("Deployment", "StatefulSet", "ReplicaSet", "DaemonSet", "Job"):
        made = tuple(name_of(claim) for claim in spec.get("volumeClaimTemplates") or [])
        yield _template(item, "spec.template", spec.get("template") or {}, spec.get("replicas", 1), claims=made)
    elif kind == "CronJob":
        template = ((spec.get("jobTemplate") or {}).get("spec") or {}).get("template") or {}
        yield _template(item, "spec.jobTemplate.spec.template", template, 1)
    elif kind == "RayCluster":
        yield from _ray_templates(item, spec)


def _templates_of(item: Object) -> list[PodTemplate]:
    """None of an object that is not a map where it should be one: a schema's check says that."""
    try:
        return list(pod_templates(item))
    except (AttributeError, KeyError, TypeError, ValueError):
        return []


def redis_clean_up(head: PodTemplate) -> PodTemplate:
    """The pod that KubeRay makes of the head's template when a RayCluster with its state in Redis is deleted.

    It has the head's labels but for the node type, its volumes, its init containers, and of its containers the first.
    """
    first = {**head.spec, "containers": (head.spec.get("containers") or [])[:1]}
    labels = {**head.labels, NODE_TYPE: "redis-cleanup"}
    return head._replace(labels=labels, spec=first, group="redis-cleanup", added=())


def _template(item: Object, path: str, template: Object, replicas: int, **more: Any) -> PodTemplate:
    metadata = template.get("metadata") or {}
    labels = {**more.pop("labels", {}), **(metadata.get("labels") or {})}
    spec = template.get("spec") or {}
    return PodTemplate(
        where(item), path, namespace_of(item), labels, spec, metadata, replicas, str(item.get("kind")), **more
    )


def _ray_templates(item: Object, spec: Object) -> Iterator[PodTemplate]:
    head = spec.get("headGroupSpec") or {}
    labels = {**_ray_labels(item, "head", "headgroup"), **(head.get("labels") or {})}
    template = head.get("template") or {}
    more = {"labels": labels, "group": "head", "added": tuple(_autoscaler(spec, template))}
    yield _template(item, "spec.headGroupSpec.template", template, 1, **more)
    for index, group in enumerate(spec.get("workerGroupSpecs") or []):
        name = str(group.get("groupName", index))
        labels = {**_ray_labels(item, "worker", name), **(group.get("labels") or {})}
        path, template = f"spec.workerGroupSpecs[{index}].template", group.get("template") or {}
        fewest = group.get("minReplicas") if spec.get("enableInTreeAutoscaling") else group.get("replicas")
        yield _template(item, path, template, fewest or 0, labels=labels, group=name)


def _autoscaler(spec: Object, template: Object) -> Iterator[tuple[str, Object]]:
    """KubeRay makes a container of the options; what they leave open is the operator's or the head's."""
    options = spec.get("autoscalerOptions")
    if spec.get("enableInTreeAutoscaling") and options:
        head = ((template.get("spec") or {}).get("containers") or [{}])[0]
        filled = {"image": head.get("image"), "resources": {"requests": {"cpu": "500m", "memory": "512Mi"}}}
        yield "spec.autoscalerOptions", {"name": "autoscaler", **filled, **options}


def _ray_labels(item: Object, node_type: str, group: str) -> dict[str, str]:
    """What KubeRay 1.7 puts on pods."""
    return {
        "ray.io/cluster": name_of(item),
        NODE_TYPE: node_type,
        "ray.io/group": group,
        "ray.io/identifier": f"{name_of(item)}-{node_type}",
        "ray.io/is-ray-node": "yes",
        "app.kubernetes.io/name": "kuberay",
        "app.kubernetes.io/created-by": "kuberay-operator",
    }
