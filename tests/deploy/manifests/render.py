"""From folders to objects: kustomize builds overlays, YAML is read strictly."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from tests.deploy.manifests.objects import Object, name_of

PATIENCE_S = 120
_ENDS = ("yaml", "yml", "json")


class RenderError(Exception):
    """No objects: what kustomize or YAML had to say."""


class StrictLoader(yaml.CSafeLoader):
    """A key that is there twice is an error, as it is for an API server."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = key_node.value
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is there twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


# YAML 1.1 has a type for "=", which values of Prometheus matchers run into.
StrictLoader.add_constructor("tag:yaml.org,2002:value", lambda loader, node: str(node.value))


def load(text: str, origin: str) -> list[Object]:
    try:
        documents = list(yaml.load_all(text, Loader=StrictLoader))  # a subclass of the safe loader
    except yaml.YAMLError as error:
        raise RenderError(f"{origin}: {_said(error)}") from error
    objects: list[Object] = []
    for document in documents:
        if document is None:
            continue
        if not isinstance(document, dict) or "kind" not in document or "apiVersion" not in document:
            what = f"a document without apiVersion and kind: {str(document)[:60]!r}"
            raise RenderError(f"{origin}: {what}: give it both, or leave it out")
        objects += document.get("items") or [] if document["kind"] == "List" else [document]
    return objects


def build(overlay: Path, kubectl: Path) -> list[Object]:
    """What `kubectl apply -k` would send."""
    for path in _sources(overlay):
        load_any(path)
    done = subprocess.run(
        [kubectl, "kustomize", str(overlay)], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    if done.returncode:
        raise RenderError(f"{overlay}: kustomize: {_error_of(done.stderr)}")
    objects = load(done.stdout, str(overlay))
    _check_targets(overlay, {(str(item.get("kind")), name_of(item)) for item in objects})
    return objects


def build_with(overlay: Path, components: Iterable[str], kubectl: Path) -> list[Object]:
    """An overlay with further components, as a user would add them: `../../components/NAME`, in a copy of the tree."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(
            shutil.copytree(overlay.parents[2], Path(folder) / "deploy")
        )  # components take in what is beside k8s
        file = tree / overlay.relative_to(overlay.parents[2]) / "kustomization.yaml"
        told = load_any(file)[0]
        told["components"] = [*(told.get("components") or []), *(f"../../components/{name}" for name in components)]
        file.write_text(yaml.safe_dump(told))
        return build(file.parent, kubectl)


def read(path: Path, kubectl: Path | None) -> tuple[list[Object], list[RenderError]]:
    """An overlay is built, a folder of plain manifests or a file is read as it is, as far as it can be read."""
    if is_overlay(path):
        assert kubectl is not None
        return build(path, kubectl), []
    files = [path] if not path.is_dir() else sorted(file for end in _ENDS for file in path.rglob(f"*.{end}"))
    objects: list[Object] = []
    errors: list[RenderError] = []
    for file in files:
        try:
            objects += load(file.read_text(), str(file))
        except RenderError as error:
            errors.append(error)
    objects = [item for item in objects if not str(item.get("apiVersion", "")).startswith("kustomize.config.k8s.io")]
    if not objects and not errors:
        errors.append(RenderError(f"{path}: no manifests here: name an overlay, a folder or a file that has some"))
    return objects, errors


def overlays_below(path: Path) -> list[Path]:
    """The path itself, or what is to be applied below it: every kustomization that no other one takes in."""
    if path.is_file() or is_overlay(path):
        return [path]
    found = [file.parent for file in sorted(path.rglob("kustomization.yaml")) if is_overlay(file.parent)]
    taken = {part.resolve() for overlay in found for part in _parts(overlay)}
    return [overlay for overlay in found if overlay.resolve() not in taken] or [path]


def is_overlay(path: Path) -> bool:
    file = path / "kustomization.yaml"
    return file.is_file() and (load_any(file)[0] or {}).get("kind", "Kustomization") == "Kustomization"


def load_any(path: Path) -> list[Any]:
    """Documents of any YAML: kustomize itself takes the last of two equal keys without a word."""
    try:
        return list(yaml.load_all(path.read_text(), Loader=StrictLoader))
    except yaml.YAMLError as error:
        raise RenderError(f"{path}: {_said(error)}") from error


def components_of(overlay: Path) -> set[Path]:
    """Taken in, directly or by what is taken in."""
    found: set[Path] = set()
    for part in _parts(overlay):
        if part.is_dir():
            found |= {part.resolve()} | components_of(part)
    return found


def _said(error: yaml.YAMLError) -> str:
    return " ".join(str(error).replace('in "<unicode string>", ', "").split())


def _error_of(said: str) -> str:
    """kubectl wraps it in a line of a log."""
    last = (said.strip().splitlines() or ["?"])[-1]
    found = re.search(r'err="(.*)"$', last)
    return found[1].replace('\\"', '"').replace("\\n", " ") if found else last


def _check_targets(overlay: Path, rendered: set[tuple[str, str]]) -> None:
    """A patch whose target is not there changes nothing, and kustomize says nothing. Raises RenderError."""
    documents = {path: [one for one in load_any(path) if isinstance(one, dict)] for path in _sources(overlay)}
    known = rendered | {(str(one.get("kind")), name_of(one)) for told in documents.values() for one in told}
    for one in (one for told in documents.values() for one in told):
        for field, kind in (("configMapGenerator", "ConfigMap"), ("secretGenerator", "Secret")):
            known |= {(kind, str(made.get("name"))) for made in one.get(field) or []}
    for path in (path for path in documents if path.name == "kustomization.yaml"):
        for index, patch in enumerate(documents[path][0].get("patches") or []):
            target = patch.get("target") or {}
            kind, name = str(target.get("kind", ".*")), str(target.get("name", ".*"))
            if not any(re.fullmatch(kind, one) and re.fullmatch(name, other) for one, other in known):
                raise RenderError(f"{path}: patches[{index}].target: no {kind} is named {name}: name what is there")


def _parts(overlay: Path) -> list[Path]:
    told = (load_any(overlay / "kustomization.yaml") or [{}])[0] or {}
    return [overlay / str(part) for field in ("resources", "components") for part in told.get(field) or []]


def _sources(overlay: Path) -> list[Path]:
    """YAML files that kustomize will read for it."""
    files = {overlay / "kustomization.yaml"}
    for part in _parts(overlay):
        if part.is_file():
            files.add(part)
        elif (part / "kustomization.yaml").is_file():
            files |= set(_sources(part))
    return sorted(files)
