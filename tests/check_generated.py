"""Is `twostroke/rpc/v1` what `make proto` would write? Prints each file that is not; exit status 1 then."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = Path("twostroke/rpc/v1")
OUTPUTS = ("--python_out", "--pyi_out", "--grpc_python_out", "--mypy_grpc_out")


def generate(root: Path, into: Path) -> None:
    """Runs the same command as the Makefile."""
    protos = sorted(str(path.relative_to(root)) for path in (root / "proto" / PACKAGE).glob("*.proto"))
    plugin = Path(sys.executable).parent / "protoc-gen-mypy_grpc"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "grpc_tools.protoc", "-I", "proto", f"--plugin=protoc-gen-mypy_grpc={plugin}"),
            *(f"{output}={into}" for output in OUTPUTS),
            *protos,
        ],
        cwd=root,
        check=False,
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        sys.exit(f"protoc failed:\n{done.stderr}")


def differences(root: Path, generated: Path) -> list[str]:
    """One line for each file that is missing, left over or out of date."""
    fresh = {path.name: path.read_bytes() for path in (generated / PACKAGE).iterdir()}
    committed = {path.name: path.read_bytes() for path in (root / PACKAGE).glob("*_pb2*")}
    lines = []
    for name in sorted(fresh.keys() | committed.keys()):
        if name not in committed:
            lines.append(f"{PACKAGE / name}: missing")
        elif name not in fresh:
            lines.append(f"{PACKAGE / name}: no .proto makes it any more")
        elif fresh[name] != committed[name]:
            lines.append(f"{PACKAGE / name}: out of date")
    return lines


def check(root: Path) -> int:
    with tempfile.TemporaryDirectory() as folder:
        generate(root, Path(folder))
        lines = differences(root, Path(folder))
    for line in lines:
        print(line)
    if lines:
        print("run: make proto")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(check(ROOT))
