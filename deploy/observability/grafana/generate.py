"""Writes the dashboards beside this file: `python deploy/observability/grafana/generate.py`.

A panel is a title, a unit and its queries; the rest of Grafana's JSON is the same for all. Every query is run against a
real Prometheus with a real cluster by tests/deploy/test_observability.py, which also holds the files against this.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

from fleet import FLEET
from shape import Dashboard, Panel
from worker import WORKER

from router import ROUTER

WIDTH, HEIGHT, COLUMNS = 8, 7, 24
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
DASHBOARDS = {"fleet.json": FLEET, "worker.json": WORKER, "router.json": ROUTER}


def rendered(dashboard: Dashboard) -> str:
    variables = [{"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Prometheus"}]
    if dashboard.instances_of is not None:
        query = f"label_values({dashboard.instances_of}, instance)"
        variables.append(
            {
                "name": "instance",
                "type": "query",
                "label": "process",
                "datasource": DATASOURCE,
                "query": {"query": query, "refId": "instances"},
                "definition": query,
                "refresh": 2,
                "includeAll": True,
                "allValue": ".*",
                "multi": True,
                "current": {"text": "All", "value": "$__all"},
            }
        )
    model = {
        "uid": dashboard.uid,
        "title": dashboard.title,
        "tags": ["twostroke"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "15s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": variables},
        "panels": list(_laid_out(dashboard)),
    }
    return _text(model)


def _laid_out(dashboard: Dashboard) -> Iterator[dict[str, object]]:
    number, y = 0, 0
    for row, panels in dashboard.rows:
        number += 1
        yield {
            "id": number,
            "type": "row",
            "title": row,
            "collapsed": False,
            "panels": [],
            "gridPos": _at(0, y, COLUMNS, 1),
        }
        y += 1
        for index, panel in enumerate(panels):
            number += 1
            x = index * WIDTH % COLUMNS
            yield _panel(number, panel, _at(x, y + index * WIDTH // COLUMNS * HEIGHT, WIDTH, HEIGHT))
        y += -(-len(panels) * WIDTH // COLUMNS) * HEIGHT


def _at(x: int, y: int, width: int, height: int) -> dict[str, int]:
    return {"x": x, "y": y, "w": width, "h": height}


def _panel(number: int, panel: Panel, at: dict[str, int]) -> dict[str, object]:
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.about,
        "datasource": DATASOURCE,
        "gridPos": at,
        "fieldConfig": {
            "defaults": {"unit": panel.unit, "min": None if panel.title == "clocks" else 0},
            "overrides": [],
        },
        "targets": [
            {"refId": chr(ord("A") + index), "datasource": DATASOURCE, "expr": query, "legendFormat": legend}
            for index, (query, legend) in enumerate(panel.queries)
        ],
    }


def _text(model: dict[str, object]) -> str:
    """A line for each panel: what changes shows."""
    panels = model.pop("panels")
    assert isinstance(panels, list)
    outer = ",\n".join(f" {json.dumps(key)}: {json.dumps(value)}" for key, value in model.items())
    lines = ",\n".join(f"  {json.dumps(panel)}" for panel in panels)
    return f'{{\n{outer},\n "panels": [\n{lines}\n ]\n}}\n'


def main() -> int:
    """`--check`: 1 where a file is not what would be written."""
    stale = 0
    for name, dashboard in DASHBOARDS.items():
        path, text = Path(__file__).parent / name, rendered(dashboard)
        if "--check" not in sys.argv:
            path.write_text(text)
        elif not path.is_file() or path.read_text() != text:
            print(f"{path} is not up to date: run python deploy/observability/grafana/generate.py")
            stale = 1
    return stale


if __name__ == "__main__":
    sys.exit(main())
