"""`make quick`: lint of what changed against main, and the unit tests that it touches, in less than a minute.

The graph of imports says which tests those are: tests that import a changed module come first, then those that import
what imports it, and so on. Some seconds before the minute is over no further test begins. What was left out is printed,
and `make test` runs it.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
BRANCH = "main"
UNIT = "tests/unit/"
TOUR = "tests/unit/test_tour.py"
TESTS_S = 42.0
"""Seconds from the start in which tests may begin: the last ones, and pytest's end, take some of a minute."""
LEAST_S = 10.0
"""Seconds that tests have once they are collected: lint and imports take long where other things run."""
MOST_FILES = 16
"""Files of tests: to collect many takes longer than there is time."""
PROCESSES = 2
BIN = Path(sys.executable).parent
UNTIL = "TWOSTROKE_QUICK_UNTIL"
"""Variable with the time (of the wall) after which no test begins."""
SKIPPED = "not run, as the time is over: "


def module_of(path: str) -> str:
    """The dotted name of a file of Python."""
    parts = Path(path).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(text: str, known: Collection[str]) -> set[str]:
    """Modules of the tree that this text imports, or names in a string (as tables of commands do)."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            found.update((node.module, *(f"{node.module}.{alias.name}" for alias in node.names)))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in known:
            found.add(node.value)
    packages = {name.rpartition(".")[0] for name in found}
    return (found | packages) & set(known)


def graph_of(texts: Mapping[str, str], gone: Iterable[str] = ()) -> dict[str, set[str]]:
    """For each file the files that import it. `gone` are files that somebody may import still."""
    paths = {module_of(path): path for path in (*texts, *gone)}
    importers: dict[str, set[str]] = {path: set() for path in paths.values()}
    for path, text in texts.items():
        for name in imports_of(text, paths.keys()):
            importers[paths[name]].add(path)
    for path in texts:
        for conftest in _conftests_of(path):
            if conftest in importers:
                importers[conftest].add(path)
    return importers


def touched(changed: Iterable[str], importers: Mapping[str, Collection[str]]) -> list[str]:
    """Files of unit tests that reach a changed file by imports, the nearest first."""
    reached = {path: 0 for path in changed if path in importers}
    waiting = deque(reached)
    while waiting:
        path = waiting.popleft()
        for importer in sorted(importers[path]):
            if importer not in reached:
                reached[importer] = reached[path] + 1
                waiting.append(importer)
    tests = [path for path in reached if path.startswith(UNIT) and Path(path).name.startswith("test_")]
    return sorted(tests, key=lambda path: (reached[path], path))


def _conftests_of(path: str) -> Iterator[str]:
    for folder in Path(path).parents:
        if str(folder) != ".":
            yield f"{folder}/conftest.py"


def _git(*words: str) -> list[str]:
    return subprocess.run(("git", *words), cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()


def with_tour(tests: list[str]) -> list[str]:
    """The tour's test reads files and imports none, so it runs first wherever any test does."""
    return [TOUR, *(test for test in tests if test != TOUR)] if tests else []


def changed_files() -> list[str]:
    """Files that differ from where this branch left main: committed, not committed, new or gone."""
    (base,) = _git("merge-base", "HEAD", BRANCH)
    return sorted({*_git("diff", "--name-only", base), *_git("ls-files", "--others", "--exclude-standard")})


def lint(changed: list[str]) -> bool:
    """Formatting and rules of the changed files; types, contracts and English of the whole tree."""
    own = [path for path in changed if path.endswith(".py") and (ROOT / path).is_file()]
    commands = [
        ["ruff", "format", "--check", "--force-exclude", *own],
        ["ruff", "check", "--force-exclude", *own],
        ["mypy"],
        ["lint-imports"],
        ["python", "-m", "tests.check_english"],
    ]
    running = [
        subprocess.Popen(
            [str(BIN / program), *words], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for program, *words in (commands if own else commands[-1:])
    ]
    is_well = True
    for process in running:
        printed, _ = process.communicate()
        if process.returncode:
            print(printed, end="", flush=True)
            is_well = False
    return is_well


def run_tests(tests: list[str], until_s: float) -> bool:
    """The nearest first, every second one in another process."""
    options = ["-q", "--no-header", "-p", "tests.quick", "-p", "no:cacheprovider"]
    environment = {**os.environ, UNTIL: str(until_s)}
    running = [
        subprocess.Popen(
            [sys.executable, "-m", "pytest", *options, *tests[number::PROCESSES]], cwd=ROOT, env=environment
        )
        for number in range(min(PROCESSES, len(tests)))
    ]
    codes = [process.wait() for process in running]
    return set(codes) <= {pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED}


def pytest_collection_finish(session: pytest.Session) -> None:
    session.config.stash[_UNTIL_S] = max(float(os.environ[UNTIL]), time.time() + LEAST_S)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> bool | None:
    """A test that would begin too late is left out, once and for all."""
    if time.time() < item.config.stash[_UNTIL_S]:
        return None
    item.config.stash.setdefault(_LEFT_OUT, set()).add(item.nodeid.partition("::")[0])
    return True


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    found = config.stash.get(_LEFT_OUT, None)
    if found is not None:
        left_out = sorted(found)
        terminalreporter.write_line(f"{SKIPPED}{len(left_out)} files, such as {left_out[0]} (make test runs them)")


_UNTIL_S = pytest.StashKey[float]()
_LEFT_OUT = pytest.StashKey[set[str]]()


def main() -> int:
    until_s = time.time() + TESTS_S
    changed = changed_files()
    files = _git("ls-files", "--cached", "--others", "--exclude-standard", "*.py")
    texts = {path: (ROOT / path).read_text(encoding="utf-8") for path in files if (ROOT / path).is_file()}
    gone = [path for path in changed if path.endswith(".py") and path not in texts]
    tests = with_tour(touched(changed, graph_of(texts, gone)))
    print(f"{len(changed)} files changed, {len(tests)} files of unit tests touched", flush=True)
    is_clean = lint(changed)
    passes = run_tests(tests[:MOST_FILES], until_s)
    if len(tests) > MOST_FILES:
        print(f"{len(tests) - MOST_FILES} files of tests are further away (make test runs them)")
    others = [path for path in changed if path.startswith("tests/") and not path.startswith(UNIT)]
    if others:
        print(f"changed, and no unit tests: {', '.join(others[:5])} (make test)")
    return 0 if is_clean and passes else 1


if __name__ == "__main__":
    sys.exit(main())
