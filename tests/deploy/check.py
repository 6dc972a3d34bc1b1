"""`python -m tests.deploy.check PATH...`: one line per mistake in manifests; status 1 if there is one, 2 if unreadable.

A path is an overlay (built with kustomize), a folder that has overlays, a folder of plain manifests, or a file.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.deploy.manifests.checks import Checker
from tests.deploy.manifests.render import RenderError, overlays_below, read
from tests.deploy.tools import HOW_TO_GET, find_tool


def main(arguments: list[str]) -> int:
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
            for overlay in overlays_below(path):
                objects = read(overlay, kubectl)
                findings = checker.findings(objects)
                print(f"{overlay}: {len(objects)} objects, {len(findings)} findings")
                for finding in findings:
                    print(f"  {finding}")
                count += len(findings)
        except RenderError as error:
            print(f"{error}: [renders]")
            count += 1
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
