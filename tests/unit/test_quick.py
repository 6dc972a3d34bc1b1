"""`make quick` runs the tests that a change touches, the nearest first, and none when its time is over."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from tests.quick import ROOT, TOUR, UNTIL, graph_of, imports_of, module_of, touched, with_tour

TEXTS = {
    "a/__init__.py": "",
    "a/low.py": "",
    "a/middle.py": "from a.low import x",
    "b/top.py": "from a import middle",
    "b/table.py": "COMMANDS = {'low': 'a.low'}",
    "tests/unit/conftest.py": "",
    "tests/unit/a/test_low.py": "import a.low",
    "tests/unit/b/test_top.py": "from b.top import y",
    "tests/unit/b/test_table.py": "from b import table",
    "tests/unit/helper.py": "from a import low",
    "tests/unit/test_helped.py": "from tests.unit.helper import z",
    "tests/cluster/test_far.py": "import a.low",
}


def test_a_file_is_known_by_its_dotted_name() -> None:
    assert [module_of(path) for path in ("a/__init__.py", "a/b.py")] == ["a", "a.b"]


def test_imports_are_found_in_every_form_and_in_tables_of_names() -> None:
    known = {"a", "a.low", "a.middle", "b.top"}
    assert imports_of("import a.low", known) == {"a", "a.low"}
    assert imports_of("from a import low, nothing", known) == {"a", "a.low"}
    assert imports_of("from a.middle import f", known) == {"a", "a.middle"}
    assert imports_of("def f():\n    from b.top import g", known) == {"b.top"}
    assert imports_of("x = 'b.top', 'else'", known) == {"b.top"}


def test_tests_that_reach_a_change_are_touched_the_nearest_first() -> None:
    assert touched(["a/low.py"], graph_of(TEXTS)) == [
        "tests/unit/a/test_low.py",
        "tests/unit/b/test_table.py",
        "tests/unit/test_helped.py",
        "tests/unit/b/test_top.py",
    ]
    assert touched(["a/middle.py"], graph_of(TEXTS)) == ["tests/unit/b/test_top.py"]
    assert touched(["README.md"], graph_of(TEXTS)) == []


def test_a_test_is_touched_by_itself_by_its_fixtures_and_by_what_is_gone() -> None:
    assert touched(["tests/unit/b/test_top.py"], graph_of(TEXTS)) == ["tests/unit/b/test_top.py"]
    assert len(touched(["tests/unit/conftest.py"], graph_of(TEXTS))) == 4
    left = {path: text for path, text in TEXTS.items() if path != "b/top.py"}
    assert touched(["b/top.py"], graph_of(left, gone=["b/top.py"])) == ["tests/unit/b/test_top.py"]


def test_no_test_begins_when_the_time_is_over(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        "import time\ndef test_one():\n    time.sleep(0.2)\ndef test_two():\n    assert False\n"
    )
    (tmp_path / "least.py").write_text("from tests import quick\nquick.LEAST_S = 0.1\n")
    for until_s, code, said in ((time.time() - 1, 0, "not run, as the time is over: 1 files"), (1e12, 1, "1 failed")):
        ran = subprocess.run(
            [
                sys.executable,
                "-m",
                "pytest",
                "-q",
                "-p",
                "least",
                "-p",
                "tests.quick",
                "--rootdir",
                str(tmp_path),
                str(tmp_path),
            ],
            cwd=tmp_path,
            env={"PYTHONPATH": f"{ROOT}:{tmp_path}", "PATH": "", UNTIL: str(until_s)},
            check=False,
            capture_output=True,
            text=True,
        )
        assert said in ran.stdout, ran.stdout + ran.stderr
        assert ran.returncode == code


def test_the_tour_is_checked_wherever_a_test_runs() -> None:
    assert with_tour(["tests/unit/test_a.py", TOUR]) == [TOUR, "tests/unit/test_a.py"]
    assert with_tour([]) == []
    assert Path(TOUR).is_file()
