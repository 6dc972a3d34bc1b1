"""Are docstrings whole sentences, and names the field's words (the glossary of the conventions)? `make lint` asks.

python -m tests.check_english    prints what is to be mended; exit status 1 then
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
GENERATED = "twostroke/rpc/v1/"
OWN = ("tests/check_english.py", "tests/unit/test_check_english.py")
"""Files that name what is banned."""

OPENING = re.compile(r"(?:Of|That|Nor|Or|And|As|Where|Who|Whose|By|Until|Because|To be)\b", re.IGNORECASE)
"""Such a docstring continues the line before it, and is read without that line."""

LOGGING = frozenset({"debug", "info", "warning", "error", "exception", "critical"})
LOG_KEY = re.compile(r"(\w+)=")
METRIC = re.compile(r"\btwostroke_[a-z0-9_]+\b")
METRIC_FILES = (".json", ".md", ".yml", ".yaml")
PROTO_NAME = re.compile(r"\b[A-Za-z_][A-Za-z0-9_]*\b")
PART = re.compile(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+|[A-Z]+")


class Finding(NamedTuple):
    path: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.text}"


class Banned(NamedTuple):
    words: str
    """Parts of a name, one after the other."""
    say: str
    under: tuple[str, ...] = ()
    """Only in these folders; everywhere, if empty."""
    only: str = ""
    """Only names of a "class" or "file", and only if nothing else is in the name."""


REQUEST = ("router/", "decode_worker/", "prefill_worker/", "twostroke/")
WORKER = ("twostroke/", "decode_worker/", "prefill_worker/", "proto/")
CLUSTER = ("cluster/",)
HARNESS = ("tools/", "tests/")

GLOSSARY = (
    *(Banned(word, "block hash") for word in ("block name", "block names", "named blocks")),
    *(Banned(word, "epoch") for word in ("life", "lives")),
    *(Banned(word, "digest") for word in ("checksum", "checksums")),
    Banned("stroke", "phase"),
    Banned("takeover", "local prefill, stream recovery or router restart"),
    *(
        Banned(word, "GenerateRequest, QueuedRequest or Placement", REQUEST, "class")
        for word in ("Ask", "Call", "Asked", "Wanting", "Held", "Turn", "Open Request", "Wanted")
    ),
    *(Banned(word, "page source") for word in ("giver", "givers", "computer", "computers")),
    *(Banned(word, "endpoint") for word in ("door", "doors")),
    *(Banned(word, "frontend, request handler") for word in ("front", "fronts")),
    *(Banned(word, "AuthContext") for word in ("visit", "visits")),
    Banned("doorman", "auth"),
    Banned("account", "request stats", ("router/",)),
    Banned("surroundings", "dependencies"),
    *(Banned(word, "admission queue") for word in ("waiting room", "waiting rooms")),
    Banned("turns", "fair queue", ("router/",), "file"),
    Banned("headroom", "capacity"),
    *(Banned(word, "active tenants") for word in ("claimant", "claimants")),
    *(Banned(word, "false rejections") for word in ("ghost", "ghosts")),
    Banned("unforeseen", "prediction residual"),
    *(Banned(word, "re-reference rate") for word in ("regret", "regrets")),
    *(Banned(word, "exponential search") for word in ("gallop", "gallops")),
    *(Banned(word, "the worker's blocks") for word in ("shelf", "shelves")),
    Banned("vigil", "failure detector"),
    *(Banned(word, "worker") for word in ("member", "members")),
    Banned("standing", "worker status"),
    Banned("everyone", "broadcast"),
    Banned("found", "recovered", ("router/",), "file"),
    Banned("moving", "migration", ("router/",), "file"),
    Banned("refuge", "migration target"),
    Banned("book", "request manager"),
    Banned("outbox", "output stream"),
    Banned("farewell", "detach notice"),
    Banned("Line", "waiting queue", WORKER, "class"),
    Banned("owed", "pending tokens"),
    Banned("settle", "update"),
    Banned("forsake", "abort"),
    Banned("vacate", "free"),
    *(Banned(word, "slot") for word in ("seat", "seats")),
    Banned("plant", "engine state"),
    Banned("news", "condition"),
    Banned("Gate", "request validator", WORKER, "class"),
    Banned("bequest", "cache hand-off"),
    *(Banned(word, "successor") for word in ("heir", "heirs")),
    *(Banned(word, "cached-only", WORKER) for word in ("resident", "residents")),
    *(Banned(word, "TLS") for word in ("seal", "seals", "sealed")),
    Banned("hello", "handshake"),
    *(Banned(word, "copy thread", WORKER) for word in ("lane", "lanes")),
    Banned("spoilt", "corrupt"),
    Banned("ground", "Ray backend"),
    Banned("attendant", "supervisor client"),
    Banned("staff", "reconciler"),
    Banned("roster", "desired state"),
    *(Banned(word, "slot", CLUSTER, "class") for word in ("Post", "Posts")),
    Banned("pilot", "autoscaler"),
    Banned("orders", "control socket", CLUSTER),
    Banned("bound", "parent-death guard", CLUSTER, "file"),
    *(Banned(word, "routing adapter") for word in ("brain", "brains")),
    Banned("crew", "worker lifecycle"),
    Banned("agenda", "event queue"),
    *(Banned(word, "simulated request") for word in ("journey", "journeys")),
    Banned("arms", "variants", HARNESS, "file"),
    *(Banned(word, "faults") for word in ("blow", "blows")),
    *(Banned(word, "triggers") for word in ("stimulus", "stimuli")),
    Banned("rest", "leak check", HARNESS, "file"),
    Banned("play", "run", HARNESS, "file"),
)
"""What is not to name anything, and what to say. Ordinary English in a sentence stays ordinary."""


def parts_of(name: str) -> tuple[str, ...]:
    return tuple(part.lower() for part in PART.findall(name))


BY_FIRST_PART: dict[str, list[tuple[Banned, tuple[str, ...]]]] = {}
for _each in GLOSSARY:
    _parts = parts_of(_each.words.replace(" ", "_"))
    BY_FIRST_PART.setdefault(_parts[0], []).append((_each, _parts))


def banned_in(name: str, path: str, kind: str) -> Iterator[Banned]:
    """What is banned in a name of that kind: "class", "file" or another one."""
    parts = parts_of(name)
    for at, part in enumerate(parts):
        for banned, words in BY_FIRST_PART.get(part, ()):
            if parts[at : at + len(words)] != words or (banned.under and not path.startswith(banned.under)):
                continue
            if not banned.only or (banned.only == kind and parts == words):
                yield banned


def findings(path: str, text: str) -> Iterator[Finding]:
    """What is wrong in one file of the tree."""
    for part in Path(path).with_suffix("").parts:
        yield from _of_name(part, path, 1, "file")
    if path.endswith(".py"):
        tree = ast.parse(text)
        nodes = list(ast.walk(tree))
        yield from _openings(nodes, path)
        yield from _python_names(nodes, path)
    elif path.endswith(".proto"):
        for number, line in enumerate(text.splitlines(), start=1):
            for name in dict.fromkeys(PROTO_NAME.findall(line.partition("//")[0])):
                yield from _of_name(name, path, number, "name")
    elif path.endswith(METRIC_FILES):
        for name in sorted(set(METRIC.findall(text))):
            yield from _of_name(name, path, 1 + text[: text.index(name)].count("\n"), "metric")


def _of_name(name: str, path: str, line: int, kind: str) -> Iterator[Finding]:
    for banned in banned_in(name, path, kind):
        yield Finding(path, line, f"{kind} {name}: not {banned.words!r}, say {banned.say}")


def _openings(nodes: Iterable[ast.AST], path: str) -> Iterator[Finding]:
    """Docstrings of modules, classes, functions and of attributes alike: texts that are statements."""
    for node in nodes:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            said = node.value.value.strip()
            if OPENING.match(said):
                shown = " ".join(said.split()[:8])
                yield Finding(path, node.lineno, f"a docstring is a whole sentence: {shown!r}")


def _python_names(nodes: Iterable[ast.AST], path: str) -> Iterator[Finding]:
    """Each name once, where it is given first."""
    given: set[tuple[str, str]] = set()
    for kind, name, line in sorted(_given(nodes), key=lambda each: each[2]):
        if (kind, name) not in given:
            given.add((kind, name))
            yield from _of_name(name, path, line, kind)


def _given(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, str, int]]:
    for node in nodes:
        match node:
            case ast.ClassDef():
                yield "class", node.name, node.lineno
            case ast.FunctionDef() | ast.AsyncFunctionDef() if not node.name.startswith("test_"):  # a sentence
                yield "function", node.name, node.lineno
            case ast.arg():
                yield "argument", node.arg, node.lineno
            case ast.Name(ctx=ast.Store()):
                yield "variable", node.id, node.lineno
            case ast.Attribute(ctx=ast.Store()):
                yield "attribute", node.attr, node.lineno
            case ast.alias(asname=str(name)):
                yield "import", name, node.lineno
            case ast.Constant(value=str(text)) if METRIC.fullmatch(text):
                yield "metric", text, node.lineno
            case ast.Call(func=ast.Attribute(attr=attr), args=[ast.Constant(value=str(text)), *_]) if attr in LOGGING:
                for key in LOG_KEY.findall(text):
                    yield "log key", key, node.lineno


def files_of(root: Path) -> list[str]:
    """Tracked files, and new ones that git does not ignore."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout.splitlines()
    return [path for path in listed if not path.startswith(GENERATED) and path not in OWN and (root / path).is_file()]


def all_findings(root: Path, files: Iterable[str]) -> list[Finding]:
    read = (".py", ".proto", *METRIC_FILES)
    return [
        finding
        for path in files
        if path.endswith(read)
        for finding in findings(path, (root / path).read_text(encoding="utf-8"))
    ]


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.parse_args(arguments)
    found = all_findings(root, files_of(root))
    for finding in found:
        print(finding)
    if found:
        print("the rules are in CONTRIBUTING.md")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
