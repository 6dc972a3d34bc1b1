"""dev-cpu is for one small node: what its pods request together, with what KubeRay adds to them."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path

from tests.deploy.manifests.render import build
from tests.deploy.manifests.words import quantity
from tests.deploy.tools import tool
from tests.trials.chaos.pods import kuberay
from tests.trials.chaos.pods.manifests import Manifests, Object

OVERLAY = Path(__file__).parents[2] / "deploy/k8s/overlays/dev-cpu"


def test_a_node_of_two_cpus_and_six_gibibytes_has_room_for_dev_cpu() -> None:
    objects = build(OVERLAY, tool("kubectl"))
    (cluster,) = (each for each in objects if each["kind"] == "RayCluster")
    templates = [template for _, template in kuberay.pods(cluster)]
    manifests = Manifests(tuple(objects))
    deployments = [each for each in objects if each["kind"] == "Deployment"]
    templates += [each["spec"]["template"] for each in deployments for _ in range(manifests.replicas(each))]
    assert len(templates) == 6
    assert sum(_requested(template, "cpu") for template in templates) < 2
    assert sum(_requested(template, "memory") for template in templates) < 6 << 30


def _requested(template: Object, name: str) -> Decimal:
    """Sidecars run beside the others."""
    spec = template["spec"]
    amounts = [
        quantity(container["resources"]["requests"][name])
        for container in [*spec.get("initContainers", ()), *spec["containers"]]
    ]
    return sum((amount for amount in amounts if amount is not None), Decimal(0))
