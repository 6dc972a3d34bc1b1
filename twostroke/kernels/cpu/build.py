"""Build the native kernels once per kind of machine, compiler and user, into a folder that outlives the run."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import logging
import os
import re
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import IO, Any, Final

from twostroke.kernels.cpu.variants import VARIANTS, Variant, chosen_variants, cpu_features

log = logging.getLogger(__name__)

SOURCES: Final = Path(__file__).with_name("native")
"""Every .cpp in it goes into the library."""

FLAGS: Final = "-O3 -std=c++17 -fPIC -fvisibility=hidden -pthread -fno-math-errno -fno-trapping-math -ffp-contract=off"
"""Sums keep their written order, and a product is fused with a sum only where the source says `fma`: a row's result
depends neither on which loop a compiler made of it nor on which compiler that was."""

COMPILE_TIMEOUT_S: Final = 120.0

ABANDONED_S: Final = 3600.0
"""A build this old was killed: its two rounds of compiler runs are timed out long before."""

LOCK: Final = ".build.lock"
"""The file that a process locks while it builds."""

LOCKED_S: Final = 2 * COMPILE_TIMEOUT_S
"""How long the lock is waited for: its holder's two rounds of compiler runs are timed out, or it is frozen."""

LOOK_S: Final = 0.1
"""Between two looks at the lock."""


@dataclass(frozen=True, slots=True, eq=False)
class Kernels:
    """A loaded library. Each kernel's own module declares the functions that it calls."""

    library: ctypes.CDLL
    variant: str
    build: str
    """What it was made of and by: sources and flags, machine, compiler. The same for equal libraries alone."""
    reason: str = ""
    """Why this variant, where it was chosen among several."""

    def function(self, name: str, arguments: tuple[Any, ...], result: Any = None) -> Callable[..., Any]:
        """The exported C function `name`, which from here on checks and converts its arguments."""
        function = self.library[name]
        function.argtypes = list(arguments)
        function.restype = result
        return function


def load_kernels(folder: Path, variants: Sequence[Variant] | None = None) -> Kernels | None:
    """The library of the first of `variants` that there is, built if `folder` does not hold it yet; None without any.

    None for `variants`: what this CPU can run, the preferred one first. One warning where it is not the first.
    """
    said = ""
    for variant in chosen_variants() if variants is None else variants:
        try:
            kernels = load_variant(folder, variant)
        except (OSError, subprocess.SubprocessError) as error:
            said = said or str(error)
            if isinstance(error, subprocess.TimeoutExpired):
                break
        else:
            if said:
                log.warning("slower native kernels than this CPU can run: variant=%s error=%s", variant.name, said)
            return kernels
    if said:
        log.warning("no native kernels, the engine will be slow: error=%s", said)
    return None


def load_variant(folder: Path, variant: Variant) -> Kernels:
    """Raises OSError or SubprocessError where it is not there and cannot be built."""
    path = _built(folder, variant)
    return Kernels(ctypes.CDLL(str(path)), variant.name, path.stem)


def build_all(folder: Path) -> None:
    """Libraries for all CPUs of this architecture, for machines without a compiler. Raises OSError without one."""
    compiler = find_compiler()
    for variant in VARIANTS:
        if variant.machine in {"", os.uname().machine}:
            _compile(folder / f"{_stem(variant)}-{compiler.name}.so", variant, compiler)


def arithmetic_identity(kernels: Kernels | None) -> str:
    """Workers where this is the same compute with the same instructions and libraries: CPU, kernels, torch."""
    facts = ("" if kernels is None else kernels.build, os.uname().machine, cpu_features(), version("torch"))
    return hashlib.blake2b("\0".join(facts).encode(), digest_size=6).hexdigest()


@dataclass(frozen=True, slots=True)
class Compiler:
    command: tuple[str, ...]
    name: str
    """Its kind and version, fit for a file's name: "gcc-12.2.0"."""


def find_compiler() -> Compiler:
    """$CXX, else the first C++ compiler on the path. Raises OSError where there is none, or it does not work."""
    chosen = shlex.split(os.environ.get("CXX", ""))
    usual = ([name] for name in ("c++", "g++", "clang++"))
    command = next((each for each in ([chosen] if chosen else usual) if shutil.which(each[0])), None)
    if command is None:
        raise FileNotFoundError("no C++ compiler found (looked for $CXX, c++, g++, clang++)")
    macros = _run([*command, "-dM", "-E", "-x", "c++", os.devnull])
    version = re.search(r'^#define __VERSION__ "(.*)"$', macros, re.MULTILINE)
    if version is None:
        raise OSError(f"{shlex.join(command)} does not say which version it is")
    kind = "clang" if "#define __clang__ " in macros else "gcc"
    return Compiler(tuple(command), f"{kind}-{re.sub('[^0-9A-Za-z.]+', '_', version[1])}")


def _built(folder: Path, variant: Variant) -> Path:
    """What was built before; or built again, where a machine went down before all of it was on its disk.

    Without a compiler, what another one has built for such machines: so images bring libraries along.
    """
    try:
        compiler = find_compiler()
    except (OSError, subprocess.SubprocessError):
        for library in sorted(folder.glob(f"{_stem(variant)}-*.so")):
            return library
        raise
    library = folder / f"{_stem(variant)}-{compiler.name}.so"
    if not _is_loadable(library):
        with _only_builder(folder):
            if not _is_loadable(library):  # nobody has built it while this process waited
                _compile(library, variant, compiler)
    return library


@contextlib.contextmanager
def _only_builder(folder: Path) -> Iterator[None]:
    """Let one process build at a time. Workers that start together would take each other's cores, and time out.

    Who has waited too long builds beside the other, which harms neither.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK).open("a") as file:
        end_s = time.monotonic() + LOCKED_S
        while not _has_locked(file) and time.monotonic() < end_s:
            time.sleep(LOOK_S)
        yield


def _has_locked(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_loadable(library: Path) -> bool:
    try:
        ctypes.CDLL(str(library))
    except OSError:
        return False
    return True


def _stem(variant: Variant) -> str:
    """A library serves exactly these sources and these flags, on every machine of this architecture whose CPU has what
    the variant needs. A folder may be shared by machines of several."""
    return f"kernels-{variant.name}-{os.uname().machine}-{source_key(variant)}"


def source_key(variant: Variant) -> str:
    """A hash of the sources and flags of a variant."""
    sources = [path.name + "\0" + path.read_text(encoding="utf-8") for path in _sources("*.h") + _sources("*.cpp")]
    facts = (*sources, FLAGS, variant.flags)
    return hashlib.blake2b("\0".join(facts).encode(), digest_size=8).hexdigest()


def _sources(pattern: str) -> list[Path]:
    return sorted(SOURCES.glob(pattern))


def _compile(library: Path, variant: Variant, compiler: Compiler) -> None:
    """Compile beside the final place and rename, so that nobody loads a part of a file."""
    command = compiler.command
    library.parent.mkdir(parents=True, exist_ok=True)  # `build_all` comes without the lock
    _remove_abandoned(library.parent)
    with tempfile.TemporaryDirectory(prefix=".build-", dir=library.parent) as scratch:
        flags = [*FLAGS.split(), *variant.flags.split()]
        sources = _sources("*.cpp")
        objects = [str(Path(scratch) / f"{source.stem}.o") for source in sources]
        jobs = [
            [*command, *flags, "-c", str(source), "-o", made] for source, made in zip(sources, objects, strict=True)
        ]
        with ThreadPoolExecutor(os.cpu_count() or 1) as workers:
            list(workers.map(_run, jobs))
        built = Path(scratch) / library.name
        _run([*command, *flags, "-shared", *objects, "-o", str(built)])
        built.rename(library)
        log.info("native kernels built path=%s variant=%s", library, variant.name)


def _remove_abandoned(folder: Path) -> None:
    for scratch in folder.glob(".build-*"):
        with contextlib.suppress(FileNotFoundError):
            if time.time() - scratch.stat().st_mtime > ABANDONED_S:
                shutil.rmtree(scratch, ignore_errors=True)


def _run(arguments: list[str]) -> str:
    """What it says. A compiler that hangs goes together with the passes that it started."""
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(
            arguments, stdin=subprocess.DEVNULL, stdout=said, stderr=said, start_new_session=True
        )
        try:
            code = process.wait(COMPILE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise
        said.seek(0)
        text = said.read().decode(errors="replace")
        if code != 0:
            raise OSError(f"{shlex.join(arguments)} failed: {text.strip()[-500:]}")
        return text
