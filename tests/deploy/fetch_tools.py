"""`make .tools`: Debian's kubectl, promtool and prometheus into `.tools/`, without installing anything.

Best effort: where a program cannot be had, its tests are skipped, and this says so. What is on PATH is not fetched.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

FOLDER = Path(__file__).parents[2] / ".tools"
NEWER_SUITE = "trixie"
"""Bookworm's kubectl is of 2020: its kustomize knows no components."""
PACKAGES = {
    "kubectl": ("kubectl", NEWER_SUITE),
    "promtool": ("prometheus", None),
    "prometheus": ("prometheus", None),
}
"""Program: (Debian package, suite to take it from; None: the machine's own)."""
PATIENCE_S = 180


def main() -> int:
    missing = [name for name in PACKAGES if shutil.which(name) is None and not (FOLDER / name).exists()]
    FOLDER.mkdir(exist_ok=True)
    for package, suite in sorted({PACKAGES[name] for name in missing}, key=str):
        wanted = [name for name in missing if PACKAGES[name] == (package, suite)]
        try:
            _fetch(package, suite, wanted)
        except (OSError, subprocess.SubprocessError, LookupError) as error:
            said = getattr(error, "stderr", "") or str(error)
            print(f".tools: {', '.join(wanted)} cannot be had ({said.strip()[-200:]}): their tests will be skipped")
    return 0


def _fetch(package: str, suite: str | None, programs: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        place.chmod(0o755)  # apt downloads as a user of its own
        options = [] if suite is None else _other_suite(place, suite)
        if suite is not None:
            _run(["apt-get", *options, "update", "-qq"], place)
        _run(["apt-get", *options, "download", "-qq", package], place)
        _run(["dpkg", "-x", str(next(place.glob("*.deb"))), "tree"], place)
        for name in programs:
            shutil.copy2(next((place / "tree").rglob(f"bin/{name}")), FOLDER / name)
            print(f".tools: {name} from Debian's package {package}")


def _other_suite(place: Path, suite: str) -> list[str]:
    """Options of apt for the machine's own mirror and keys, another suite, and lists of its own."""
    sources = place / "sources"
    for path in (sources, place / "lists" / "partial"):
        path.mkdir(parents=True)
    stanzas = [
        re.sub(r"(?m)^Suites:.*$", f"Suites: {suite}", stanza)
        for file in sorted(Path("/etc/apt/sources.list.d").glob("*.sources"))
        for stanza in file.read_text().split("\n\n")
        if re.search(r"(?m)^Suites: *(bookworm|trixie)\b(?!-)", stanza)
    ]
    if not stanzas:
        raise LookupError("no Debian mirror in /etc/apt/sources.list.d")
    (sources / "suite.sources").write_text(stanzas[0] + "\n")
    settings = {
        "Dir::Etc::SourceList": "/dev/null",
        "Dir::Etc::SourceParts": sources,
        "Dir::Etc::PreferencesParts": "/dev/null",
        "Dir::State::Lists": place / "lists",
        "Dir::State::status": "/dev/null",  # what is installed must not be taken for the newest
        "Dir::Cache::pkgcache": "",
        "Dir::Cache::srcpkgcache": "",
    }
    return [argument for name, value in settings.items() for argument in ("-o", f"{name}={value}")]


def _run(command: list[str], place: Path) -> None:
    subprocess.run(command, cwd=place, check=True, capture_output=True, text=True, timeout=PATIENCE_S)


if __name__ == "__main__":
    sys.exit(main())
