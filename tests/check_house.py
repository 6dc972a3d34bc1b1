"""Does each feature have a place, and does each room keep its bounds? `make lint` asks, and prints each footprint.

python -m tests.check_house            prints the footprint of each branch and the lines of the trunk; exit status 1
                                       where something has grown
python -m tests.check_house --update   writes what is now into tests/house.toml, where it is less than before

A footprint is the number of product files outside a branch's folders that name it. `tests/house.toml` holds the most
files that may, the arrows that may run up inside a package, and every exception from the bounds of files, folders and
classes with its reason. No number there may grow.
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "tests" / "house.toml"
PRODUCT = ("twostroke", "prefill_worker", "decode_worker", "router", "cluster", "tools")
GENERATED = "twostroke/rpc/v1/"

MOST_LINES = 450
"""Lines of a file."""
MOST_FILES = 12
"""Files of a folder, without its `__init__.py`."""
MOST_METHODS = 30
"""Methods of a class."""
MOST_FUNCTION_LINES = 60
"""Lines of a function, from its `def` to its end."""


class Source(NamedTuple):
    path: str
    text: str
    tree: ast.Module


class Finding(NamedTuple):
    place: str
    """The branch, package, folder, file or class that is meant."""
    kind: str
    """The table of `house.toml` that may allow it."""
    number: int
    bound: int
    """The most that is allowed where the table says nothing."""


def sources(root: Path) -> list[Source]:
    paths = subprocess.run(
        ["git", "ls-files", "-z", *PRODUCT], cwd=root, capture_output=True, text=True, check=True
    ).stdout.split("\0")
    python = [path for path in paths if path.endswith(".py") and not path.startswith(GENERATED)]
    texts = {path: (root / path).read_text() for path in python if (root / path).is_file()}
    return [Source(path, text, ast.parse(text)) for path, text in texts.items()]


def footprint(files: Iterable[Source], words: Sequence[str], folders: Sequence[str]) -> list[str]:
    """Returns the files outside the branch's folders that have one of its words in them, in any case."""
    named = re.compile("|".join(words), re.IGNORECASE)
    return [file.path for file in files if not file.path.startswith(tuple(folders)) and named.search(file.text)]


def trunk_lines(files: Iterable[Source], table: Mapping[str, Any]) -> int:
    """Returns the lines of the servers that belong to no branch."""
    own = [folder for branch in table["branches"].values() for folder in branch["folders"]]
    others = (*own, *table["trunk"]["besides"], *table["tables"])
    packages = tuple(table["trunk"]["packages"])
    kept = [file.text for file in files if file.path.startswith(packages) and not file.path.startswith(others)]
    return sum(text.count("\n") for text in kept)


def arrows(files: Iterable[Source], package: str) -> Counter[tuple[str, str]]:
    """Returns how many imports lead from one room of the package to another; a room is a folder or file in it."""
    found: Counter[tuple[str, str]] = Counter()
    for file in files:
        module = module_name(file.path)
        if not is_inside(module, package):
            continue
        for imported in imports(file.tree):
            if is_inside(imported, package) and (pair := (room(module, package), room(imported, package))):
                found[pair] += pair[0] != pair[1]
    return +found


def imports(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def module_name(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def is_inside(module: str, package: str) -> bool:
    return module.startswith(f"{package}.")


def room(module: str, package: str) -> str:
    return module.removeprefix(f"{package}.").split(".")[0]


def arrows_up(found: Mapping[tuple[str, str], int]) -> list[tuple[str, str]]:
    """Returns the pairs of rooms that run against the order of the others.

    The order is made greedily (Eades, Lin and Smyth, 1993): rooms that nobody needs any more go last, rooms that need
    nobody any more go first, then the one that needs most and is needed least.
    """
    left = {name for pair in found for name in pair}
    pairs = dict(found)
    first: list[str] = []
    last: list[str] = []
    while left:
        name, is_sink = _next(left, pairs)
        (last if is_sink else first).append(name)
        left.discard(name)
        pairs = {pair: count for pair, count in pairs.items() if name not in pair}
    place = {name: index for index, name in enumerate([*first, *reversed(last)])}
    return [pair for pair in found if place[pair[0]] > place[pair[1]]]


def _next(left: Iterable[str], pairs: Mapping[tuple[str, str], int]) -> tuple[str, bool]:
    above, below = Counter[str](), Counter[str]()
    for (source, target), count in pairs.items():
        above[source] += count
        below[target] += count
    for name in sorted(left):
        if not above[name]:
            return name, True
        if not below[name]:
            return name, False
    return max(sorted(left), key=lambda name: above[name] - below[name]), False


def mutual_pairs(found: Mapping[tuple[str, str], int]) -> list[tuple[str, str]]:
    return [(one, other) for one, other in found if one < other and (other, one) in found]


def room_findings(files: Sequence[Source]) -> Iterator[Finding]:
    folders = Counter(str(Path(file.path).parent) for file in files if not file.path.endswith("__init__.py"))
    yield from (Finding(path, "folders", count, MOST_FILES) for path, count in folders.items())
    for file in files:
        yield Finding(file.path, "files", len(file.text.splitlines()), MOST_LINES)
        for node in ast.walk(file.tree):
            if isinstance(node, ast.ClassDef):
                methods = sum(isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef) for item in node.body)
                yield Finding(f"{file.path}:{node.name}", "classes", methods, MOST_METHODS)
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                yield Finding(f"{file.path}:{node.name}", "functions", lines, MOST_FUNCTION_LINES)


def doubled_classes(files: Iterable[Source]) -> dict[str, list[str]]:
    """Returns the names that public classes of two files have, with these files."""
    found = defaultdict(set)
    for file in files:
        for node in file.tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].add(file.path)
    return {name: sorted(paths) for name, paths in found.items() if len(paths) > 1}


def findings(files: Sequence[Source], table: Mapping[str, Any]) -> Iterator[Finding]:
    for name, branch in table["branches"].items():
        folders = [*branch["folders"], *table.get("tables", ())]
        yield Finding(name, "branches", len(footprint(files, branch["words"], folders)), 0)
    for package in table["arrows_up"]:
        yield Finding(package, "arrows_up", len(arrows_up(arrows(files, package))), 0)
    for package in table["mutual_pairs"]:
        yield Finding(package, "mutual_pairs", len(mutual_pairs(arrows(files, package))), 0)
    yield Finding("classes", "doubled", len(doubled_classes(files)), 0)
    yield from room_findings(files)


def allowed(finding: Finding, table: Mapping[str, Any]) -> int:
    entry = table.get(finding.kind, {}).get(finding.place)
    if isinstance(entry, Mapping):
        entry = entry["most"]
    return finding.bound if entry is None else int(entry)


def problems(seen: Sequence[Finding], table: Mapping[str, Any]) -> list[str]:
    """Returns one line for each bound that is not kept, and for each exception that nothing needs any more."""
    said = [
        f"{each.place}: {each.number} {UNITS[each.kind]}, at most {most} (tests/house.toml, [{each.kind}])"
        for each in seen
        if each.number > (most := allowed(each, table))
    ]
    needed = {(each.kind, each.place) for each in seen if each.number > each.bound}
    for kind in ("folders", "files", "classes", "functions"):
        said += [
            f"tests/house.toml: [{kind}] allows {place} more than it needs: the exception can go"
            for place in table.get(kind, {})
            if (kind, place) not in needed
        ]
    return said


UNITS: Mapping[str, str] = {
    "branches": "files outside its folders name it",
    "arrows_up": "pairs of rooms whose imports run up",
    "mutual_pairs": "pairs of rooms that import each other",
    "doubled": "names of classes that two files have",
    "folders": "files in this folder",
    "files": "lines in this file",
    "classes": "methods in this class",
    "functions": "lines in this function",
}


def updated(text: str, files: Sequence[Source]) -> str:
    """Returns the table with each number lowered to what is now; none is raised."""
    table = tomllib.loads(text)
    for finding in findings(files, table):
        entry = table.get(finding.kind, {}).get(finding.place)
        if entry is None or finding.number >= allowed(finding, table):
            continue
        key = rf"{re.escape(finding.place)}" if finding.place.isidentifier() else rf'"{re.escape(finding.place)}"'
        section = rf"(^\[{finding.kind}\.{key}\]\n(?:(?!\[).*\n)*?most = )\d+"
        line = rf"(^\[{finding.kind}\]\n(?:(?!\[).*\n)*?{key} = (?:\{{ most = )?)\d+"
        for pattern in (section, line):
            text = re.sub(pattern, rf"\g<1>{finding.number}", text, count=1, flags=re.MULTILINE)
    return text


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--update", action="store_true", help="lower the numbers of the table to what is now")
    parser.add_argument("--files", metavar="BRANCH", help="print the files outside a branch's folders that name it")
    options = parser.parse_args(arguments)
    files = sources(ROOT)
    if options.update:
        TABLE.write_text(updated(TABLE.read_text(), files))
    table = tomllib.loads(TABLE.read_text())
    if options.files:
        branch = table["branches"][options.files]
        print("\n".join(footprint(files, branch["words"], branch["folders"])))
        return 0
    seen = list(findings(files, table))
    counts = {each.place: each.number for each in seen if each.kind == "branches"}
    print("files outside its folders that name a branch: " + ", ".join(f"{name} {n}" for name, n in counts.items()))
    print(f"trunk {trunk_lines(files, table)} lines")
    said = problems(seen, table)
    print("\n".join(said), end="\n" if said else "")
    return bool(said)


if __name__ == "__main__":
    sys.exit(main())
