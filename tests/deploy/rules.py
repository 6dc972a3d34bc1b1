"""Prometheus' rules as the Prometheus operator takes them: the same groups, in an object.

`python -m tests.deploy.rules` writes the object anew after `deploy/observability/prometheus/rules.yml` has changed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
RULES = ROOT / "deploy/observability/prometheus/rules.yml"
OBJECT = ROOT / "deploy/k8s/components/monitoring/prometheusrule.yaml"
HEAD = """\
# Written by `python -m tests.deploy.rules` from deploy/observability/prometheus/rules.yml: change that.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: twostroke
  labels:
    app.kubernetes.io/component: monitoring
    app.kubernetes.io/part-of: twostroke
spec:
"""


def text() -> str:
    groups = {"groups": groups_of(RULES)["groups"]}
    body = yaml.safe_dump(groups, sort_keys=False, width=10_000, allow_unicode=True)
    return HEAD + "".join(f"  {line}\n" if line else "\n" for line in body.splitlines())


def groups_of(file: Path) -> dict[str, Any]:
    read: dict[str, Any] = yaml.safe_load(file.read_text(encoding="utf-8"))
    return read


if __name__ == "__main__":
    OBJECT.write_text(text(), encoding="utf-8")
