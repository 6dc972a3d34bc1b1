"""`python -m tests.deploy.check PATH...`: one line per mistake in manifests; status 1 if there is one, 2 if unreadable.

A path is an overlay (built with kustomize), a folder that has overlays, a folder of plain manifests, or a file, also
`/dev/stdin`. A file or folder without a Namespace is taken for a part: what it names and has none of is not looked for.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.deploy.manifests.checks import Checker, kinds_elsewhere
from tests.deploy.manifests.render import RenderError, is_overlay, overlays_below, read
from tests.deploy.tools import HOW_TO_GET, find_tool


def main(arguments: list[str]) -> int:
    if {"-h", "--help"} & set(arguments):
        print(__doc__)
        return 0
    kubectl = find_tool("kubectl")
    if kubectl is None or not arguments:
        what = "which folder or file?" if kubectl else f"kubectl is missing: {HOW_TO_GET['kubectl']}"
        print(f"check: {what}", file=sys.stderr)
        return 2
    if find_tool("promtool") is None:
        print(f"check: PromQL is NOT CHECKED: promtool is missing: {HOW_TO_GET['promtool']}", file=sys.stderr)
    checker, count = Checker(), 0
    for path in map(Path, arguments):
        if not path.exists():
            print(f"check: {path}: no such file or folder", file=sys.stderr)
            return 2
        try:
            count += sum(_look(checker, overlay, kubectl) for overlay in overlays_below(path))
        except RenderError as error:
            print(f"{error} [renders]")
            count += 1
    return 1 if count else 0


def _look(checker: Checker, path: Path, kubectl: Path) -> int:
    """How many mistakes there are."""
    objects, errors = read(path, kubectl)
    findings = checker.findings(objects)
    elsewhere = {} if is_overlay(path) else kinds_elsewhere(findings, objects)
    told = [finding for finding in findings if finding not in elsewhere]
    print(f"{path}: {len(objects)} objects, {len(told) + len(errors)} findings")
    for line in (*(f"{error} [renders]" for error in errors), *told):
        print(f"  {line}")
    if elsewhere:
        kinds = ", ".join(sorted(set(elsewhere.values())))
        print(f"  (not looked at, as none is here: {kinds}; {len(elsewhere)} references)")
    return len(told) + len(errors)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
