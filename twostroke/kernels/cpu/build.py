"""Build the native kernels once per machine and user: by the system's compiler, into a folder that outlives the run."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Final

log = logging.getLogger(__name__)

SOURCE: Final = Path(__file__).with_name("attention.cpp")

FLAGS: Final = (
    "-O3 -std=c++17 -shared -fPIC -fopenmp-simd -fno-math-errno -fno-trapping-math -fno-signed-zeros -fassociative-math"
)
"""Sums may be reordered, which vectors need; infinities keep their meaning."""

TUNING: Final = ("-march=native -mprefer-vector-width=512", "-march=native", "")
"""Tried in turn: not every compiler knows every machine."""

COMPILE_TIMEOUT_S: Final = 120.0


def load_kernels(folder: Path) -> ctypes.CDLL | None:
    """The library, built if `folder` does not hold it yet. None, and one warning, where it cannot be built."""
    library = folder / f"attention-{_key()}.so"
    if not library.exists():
        try:
            _compile(library)
        except (OSError, subprocess.SubprocessError) as error:
            log.warning("no native attention, decode will be slow: error=%s", error)
            return None
    return _declare(ctypes.CDLL(str(library)))


def compiler() -> list[str] | None:
    """$CXX, else the first C++ compiler on the path."""
    chosen = shlex.split(os.environ.get("CXX", ""))
    if chosen:
        return chosen if shutil.which(chosen[0]) else None
    return next(([name] for name in ("c++", "g++", "clang++") if shutil.which(name)), None)


def _key() -> str:
    """A library serves exactly this source, these flags and this kind of CPU."""
    facts = (SOURCE.read_text(encoding="utf-8"), FLAGS, *TUNING, _cpu_features())
    return hashlib.blake2b("\0".join(facts).encode(), digest_size=8).hexdigest()


def _cpu_features() -> str:
    """The line of /proc/cpuinfo that lists instruction sets: "flags" on x86, "Features" on ARM."""
    with open("/proc/cpuinfo", encoding="utf-8") as lines:
        return next((line for line in lines if line.lower().startswith(("flags", "features"))), os.uname().machine)


def _compile(library: Path) -> None:
    """Compile beside the final place and rename, so that concurrent builders each leave a whole file."""
    command = compiler()
    if command is None:
        raise FileNotFoundError("no C++ compiler found (looked for $CXX, c++, g++, clang++)")
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".build-", dir=library.parent) as scratch:
        built = Path(scratch) / library.name
        said = ""
        for tuning in TUNING:
            arguments = [*command, *FLAGS.split(), *tuning.split(), str(SOURCE), "-o", str(built)]
            result = subprocess.run(
                arguments, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S, check=False, cwd=scratch
            )
            if result.returncode == 0:
                built.rename(library)
                log.info("native kernels built path=%s flags=%s", library, tuning)
                return
            said = result.stderr.strip()
        raise OSError(f"{shlex.join(command)} failed: {said[-500:]}")


def _declare(library: ctypes.CDLL) -> ctypes.CDLL:
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    library.twostroke_store.argtypes = [pointer, number, pointer, number, pointer, number, pointer, number]
    library.twostroke_store.restype = None
    library.twostroke_attend.argtypes = [pointer, number, pointer, number, pointer]
    library.twostroke_attend.restype = None
    return library
