"""deploy/examples/overlay, an overlay of one's own on top of ours, works outside of the repository."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests.deploy.bundles import before
from tests.deploy.manifests.checks import Checker
from tests.deploy.manifests.objects import Object, name_of
from tests.deploy.manifests.render import build
from tests.deploy.tools import ROOT, tool

EXAMPLE = ROOT / "deploy" / "examples" / "overlay"
OPTION = re.compile(r"^( +)# (- [a-z{]|  )", re.MULTILINE)
"""A line that is there to be taken out of its comment."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Somebody's own, with a checkout in it, as deploy/README.md has it."""
    mine = tmp_path / "serving"
    shutil.copytree(ROOT / "deploy", mine / "twostroke" / "deploy")
    for file in EXAMPLE.iterdir():
        shutil.copy(file, mine)
    return mine


def test_it_has_no_mistake_as_it_stands(folder: Path) -> None:
    objects = build(folder, tool("kubectl"))
    assert_well(objects)
    (router,) = (item for item in objects if item["kind"] == "Deployment")
    (box,) = router["spec"]["template"]["spec"]["containers"]
    assert box["image"] == "registry.internal/serving/twostroke:0.1.0-cuda"
    assert not any(item["apiVersion"].startswith(("keda", "gateway", "monitoring")) for item in objects)


def test_all_of_its_options_can_be_taken(folder: Path) -> None:
    file = folder / "kustomization.yaml"
    text, count = OPTION.subn(r"\1\2", file.read_text())
    file.write_text(text)
    assert count > 25
    objects = build(folder, tool("kubectl"))
    assert_well(objects)
    kinds = {item["kind"] for item in objects}
    assert kinds >= {"ServiceMonitor", "PodMonitor", "PrometheusRule", "ScaledObject", "Gateway", "GRPCRoute"}
    for item in objects:
        if item["kind"] in ("ServiceMonitor", "PodMonitor", "PrometheusRule"):
            assert item["metadata"]["labels"]["release"] == "kube-prometheus-stack"
        if item["kind"] == "ServiceAccount":
            assert item["imagePullSecrets"] == [{"name": "registry"}], name_of(item)


def assert_well(objects: list[Object]) -> None:
    found = Checker().findings([*before("prod-gpu"), *objects])
    assert not found, "\n" + "\n".join(map(str, found))
