"""What deploy/k8s can be made into: each overlay, and components that none has with an overlay that they fit.

What people make once, before an overlay, is beside it, as it is in a cluster.
"""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.deploy.manifests.objects import Object
from tests.deploy.manifests.render import build, build_with, components_of, load
from tests.deploy.tools import ROOT, tool

K8S = ROOT / "deploy" / "k8s"
OVERLAYS = {
    "dev-cpu": ("priorities", "namespace-dev"),
    "prod-gpu": ("priorities", "namespace", "models"),
}
"""With the files of `prerequisites` that are applied before."""
OBSERVED = ("monitoring", "tracing", "gateway")
WITH = {
    "dev-cpu+hpa": ("dev-cpu", ("hpa",)),
    "dev-cpu+keda": ("dev-cpu", ("monitoring", "keda")),
    "dev-cpu+router-tls": ("dev-cpu", ("router-tls",)),
    "prod-gpu+all": ("prod-gpu", (*OBSERVED, "keda", "inferencepool")),
}
"""Name: (overlay, components that it does not have)."""
NAMES = (*OVERLAYS, *WITH)


@functools.cache
def bundles() -> dict[str, list[Object]]:
    """Built once for all tests of a process."""
    with ThreadPoolExecutor(2) as pool:
        made = pool.map(overlay_of, NAMES)
        return {name: [*before(name), *objects] for name, objects in zip(NAMES, made, strict=True)}


@functools.cache
def overlay_of(name: str) -> list[Object]:
    """What `kubectl apply -k` sends, and `kubectl delete -k` takes away."""
    overlay, components = WITH.get(name, (name, ()))
    folder = K8S / "overlays" / overlay
    kubectl = tool("kubectl")
    # Labels are put on what is there by then: their component is the last.
    return build_with(folder, (*components, "labels"), kubectl) if components else build(folder, kubectl)


def before(name: str) -> list[Object]:
    overlay, _ = WITH.get(name, (name, ()))
    files = [K8S / "prerequisites" / f"{file}.yaml" for file in OVERLAYS[overlay]]
    return [item for file in files for item in load(file.read_text(), str(file))]


def components_covered() -> set[Path]:
    taken = {part for overlay in OVERLAYS for part in components_of(K8S / "overlays" / overlay)}
    return taken | {(K8S / "components" / one).resolve() for _, components in WITH.values() for one in components}
