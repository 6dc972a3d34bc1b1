"""deploy/k8s has no mistake that the checks know, and each check knows a mistake that no other one does."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.deploy import check
from tests.deploy.bundles import K8S, NAMES, OVERLAYS, bundles, components_covered, overlay_of
from tests.deploy.manifests import cel, schemas
from tests.deploy.manifests.checks import Checker, all_checks
from tests.deploy.manifests.objects import Finding
from tests.deploy.mutants_custom import CUSTOM
from tests.deploy.mutants_native import NATIVE
from tests.deploy.mutants_running import RUNNING
from tests.deploy.mutants_staying_up import STAYING_UP
from tests.deploy.mutate import Mutant, mutated
from tests.deploy.tools import tool

MUTANTS = [*NATIVE, *CUSTOM, *RUNNING, *STAYING_UP]
IN_GATE = {mutant.check: mutant for mutant in reversed(MUTANTS)}
"""The first mistake of each check; `make slow` makes the others."""


@functools.cache
def checker() -> Checker:
    return Checker()


@functools.cache
def found(name: str) -> frozenset[Finding]:
    return frozenset(checker().findings(bundles()[name]))


@pytest.mark.parametrize("name", NAMES)
def test_a_bundle_has_no_mistake(name: str) -> None:
    assert not found(name), "\n" + "\n".join(map(str, sorted(found(name))))


@pytest.mark.parametrize("name", NAMES)
def test_whoever_deletes_an_overlay_keeps_what_people_made(name: str) -> None:
    """A Namespace takes along Secrets that were made by hand; a claim, the models."""
    kinds = {item["kind"] for item in overlay_of(name)}
    assert not kinds & {"Namespace", "PersistentVolumeClaim", "PriorityClass"}


@pytest.mark.parametrize("name", OVERLAYS)
def test_an_overlay_needs_no_crds_but_kuberays(name: str) -> None:
    custom = {item["apiVersion"] for item in overlay_of(name) if schemas.is_custom(item)}
    assert custom == {"ray.io/v1"}


@pytest.mark.parametrize("name", NAMES)
def test_routers_are_counted_by_one_autoscaler_whatever_is_switched_on(name: str) -> None:
    """An apply that takes `replicas` out of a Deployment sets it to 1, until the autoscaler looks again."""
    objects = overlay_of(name)
    (router,) = (item for item in objects if item["kind"] == "Deployment")
    assert "replicas" not in router["spec"]
    (scaler,) = (item for item in objects if item["kind"] in ("HorizontalPodAutoscaler", "ScaledObject"))
    if scaler["kind"] == "ScaledObject":  # KEDA goes on with the one that was there
        assert scaler["metadata"]["annotations"]["scaledobject.keda.sh/transfer-hpa-ownership"] == "true"
        assert scaler["spec"]["advanced"]["horizontalPodAutoscalerConfig"]["name"] == "twostroke-router"
    assert scaler["metadata"]["name"] == "twostroke-router"
    assert scaler["spec"].get("minReplicas", scaler["spec"].get("minReplicaCount")) == 2


def test_the_launcher_starts_in_the_heads_pod_and_waits_where_redis_is_cleaned_up(tmp_path: Path) -> None:
    """Its script is run as it stands, with programs that say what they are asked for."""
    for program in ("twostroke", "sleep"):
        (tmp_path / program).write_text(f"#!/bin/sh\necho {program} $*\n")
        (tmp_path / program).chmod(0o755)
    (cluster,) = (item for item in overlay_of("prod-gpu") if item["kind"] == "RayCluster")
    (launcher,) = cluster["spec"]["headGroupSpec"]["template"]["spec"]["initContainers"]
    said = {}
    for node_type in ("head", "redis-cleanup"):
        environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "NODE_TYPE": node_type}
        words = [*launcher["command"], *launcher["args"]]
        said[node_type] = subprocess.run(words, env=environment, capture_output=True, text=True, check=True).stdout
    assert said["head"].startswith("twostroke up --file=/etc/twostroke/cluster/cluster.yaml")
    assert said["redis-cleanup"] == "sleep infinity\n"


def test_every_component_is_in_some_bundle() -> None:
    assert {path.resolve() for path in (K8S / "components").iterdir()} <= components_covered()


@pytest.mark.parametrize(
    "mutant",
    [
        pytest.param(
            mutant,
            id=mutant.what.replace(" ", "-"),
            marks=() if IN_GATE[mutant.check] is mutant else pytest.mark.slow,
        )
        for mutant in MUTANTS
    ],
)
def test_a_mistake_is_noticed_by_one_check(mutant: Mutant) -> None:
    if mutant.check.startswith("queries_"):
        tool("promtool")
    objects = bundles()[mutant.bundle]
    new = set(checker().findings(mutated(objects, mutant.change))) - found(mutant.bundle)
    assert {finding.check for finding in new} == {mutant.check}, "\n" + "\n".join(map(str, sorted(new)))


def test_every_check_has_a_mistake_that_it_alone_notices() -> None:
    assert set(all_checks()) == {mutant.check for mutant in MUTANTS}


def test_every_rule_of_the_crds_can_be_compiled() -> None:
    for rule in cel.rules():
        cel.program(rule)


def test_the_command_says_where_a_mistake_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tool("kubectl")
    tree = Path(shutil.copytree(K8S, tmp_path / "k8s"))
    service = tree / "base" / "services.yaml"
    service.write_text(service.read_text().replace("targetPort: http\n", "targetPort: htttp\n", 1))
    assert check.main([str(tree / "overlays" / "dev-cpu")]) == 1
    said = capsys.readouterr().out
    assert "Service/twostroke-router: spec.ports[0].targetPort: pods of Deployment/twostroke-router" in said
    service.write_text(service.read_text() + "kind: Service\n")
    assert check.main([str(tree / "overlays" / "dev-cpu")]) == 1
    assert "key 'kind' is there twice" in capsys.readouterr().out
    assert check.main([str(tmp_path / "nothing")]) == 2


def test_a_part_is_looked_at_alone_and_a_file_that_cannot_be_read_hides_no_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tool("kubectl")
    services = (K8S / "base" / "services.yaml").read_text()
    (tmp_path / "services.yaml").write_text(services)
    assert check.main([str(tmp_path / "services.yaml")]) == 0
    assert "not looked at, as none is here: pod" in capsys.readouterr().out
    (tmp_path / "services.yaml").write_text(services.replace("clusterIP: None", "clusterIP: none", 1))
    (tmp_path / "broken.yaml").write_text("a: [b")
    assert check.main([str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert "broken.yaml: while parsing a flow sequence" in said
    assert "Service/twostroke-router-headless: spec.clusterIP: 'none' is not an address" in said
    whole = (K8S / "prerequisites" / "namespace.yaml").read_text() + "---\n" + services
    (tmp_path / "whole.yaml").write_text(whole)
    assert check.main([str(tmp_path / "whole.yaml")]) == 1
    assert "selects no pod" in capsys.readouterr().out


def test_a_patch_of_what_is_not_there_is_a_mistake(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tool("kubectl")
    tree = Path(shutil.copytree(K8S, tmp_path / "k8s"))
    file = tree / "overlays" / "dev-cpu" / "kustomization.yaml"
    file.write_text(file.read_text().replace("name: twostroke-prefill}", "name: twostroke-prefil}", 1))
    assert check.main([str(file.parent)]) == 1
    assert "no PodDisruptionBudget is named twostroke-prefil" in capsys.readouterr().out
