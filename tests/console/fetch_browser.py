"""`make .tools`: Debian's headless Chromium and npm's axe-core into `.tools/`, without installing anything.

Best effort, as `tests.deploy.fetch_tools`: where one cannot be had, its tests are skipped, and this says so.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path

FOLDER = Path(__file__).parents[2] / ".tools"
TREE = FOLDER / "chromium"
"""Chromium and those of its libraries that the machine lacks, unpacked."""
BROWSER = TREE / "usr/lib/chromium/chromium-headless-shell"
INSTALLED = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
"""Names of browsers on PATH that will do."""
PACKAGE = "chromium-headless-shell"
AXE = FOLDER / "axe.min.js"
AXE_PACKAGE = "axe-core@4.14.1"
PATIENCE_S = 300


def main() -> int:
    FOLDER.mkdir(exist_ok=True)
    if not BROWSER.exists() and not any(map(shutil.which, INSTALLED)):
        _try("chromium", _fetch_browser)
    if not AXE.exists():
        _try("axe-core", _fetch_axe)
    return 0


def _try(name: str, fetch: Callable[[], None]) -> None:
    try:
        fetch()
        print(f".tools: {name} is there")
    except (OSError, subprocess.SubprocessError, tarfile.TarError) as error:
        said = getattr(error, "stderr", "") or str(error)
        print(f".tools: {name} cannot be had ({said.strip()[-200:]}): its tests will be skipped")


def _fetch_browser() -> None:
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        place.chmod(0o755)  # apt downloads as a user of its own
        (place / "partial").mkdir()
        options = ["-o", f"Dir::Cache::archives={place}", "--no-install-recommends", "--download-only", "-y", "-qq"]
        try:
            _run(["apt-get", "install", *options, PACKAGE], place)
        except subprocess.CalledProcessError:  # the lists may be older than the mirror
            _run(["apt-get", "update", "-qq"], place)
            _run(["apt-get", "install", *options, PACKAGE], place)
        for package in place.glob("*.deb"):
            _run(["dpkg", "-x", str(package), "tree"], place)
        shutil.copytree(place / "tree", TREE, symlinks=True, dirs_exist_ok=True)


def _fetch_axe() -> None:
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        _run(["npm", "pack", "--silent", AXE_PACKAGE], place)
        with tarfile.open(next(place.glob("*.tgz"))) as package:
            script = package.extractfile("package/axe.min.js")
            assert script is not None
            AXE.write_bytes(script.read())


def _run(command: list[str], place: Path) -> None:
    subprocess.run(command, cwd=place, check=True, capture_output=True, text=True, timeout=PATIENCE_S)


if __name__ == "__main__":
    sys.exit(main())
