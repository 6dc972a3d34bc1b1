"""What deploy/k8s can be made into: each overlay, and components that none has with an overlay that they fit."""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.deploy.manifests.objects import Object
from tests.deploy.manifests.render import build, build_with, components_of
from tests.deploy.tools import ROOT, tool

K8S = ROOT / "deploy" / "k8s"
OVERLAYS = ("dev-cpu", "prod-gpu")
WITH = {
    "dev-cpu+hpa": ("dev-cpu", ("hpa",)),
    "dev-cpu+front-tls": ("dev-cpu", ("front-tls",)),
    "prod-gpu+inferencepool": ("prod-gpu", ("inferencepool",)),
}
"""Name: (overlay, components that it does not have)."""
NAMES = (*OVERLAYS, *WITH)


@functools.cache
def bundles() -> dict[str, list[Object]]:
    """Built once for all tests of a process."""
    kubectl = tool("kubectl")

    def make(name: str) -> list[Object]:
        overlay, components = WITH.get(name, (name, ()))
        folder = K8S / "overlays" / overlay
        return build_with(folder, components, kubectl) if components else build(folder, kubectl)

    with ThreadPoolExecutor(2) as pool:
        return dict(zip(NAMES, pool.map(make, NAMES), strict=True))


def components_covered() -> set[Path]:
    taken = {part for overlay in OVERLAYS for part in components_of(K8S / "overlays" / overlay)}
    return taken | {(K8S / "components" / one).resolve() for _, components in WITH.values() for one in components}
