"""Builds the native kernels once per kind of machine, compiler and user, into a folder that outlives the run."""

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
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import IO, Any, Final

from twostroke.base.cache_key import cache_key, content_digest
from twostroke.base.errors import ConfigError
from twostroke.kernels.cpu.variants import VARIANTS, Variant, chosen_variants, cpu_features
from twostroke.security.trusted_paths import OURS_TO_WRITE, check_cache, make_folder

log = logging.getLogger(__name__)

SOURCES: Final = Path(__file__).with_name("native")
"""The folder of sources. Every .cpp in it goes into the library. Each subfolder is a part: a separate library, which is
built and loaded when something first needs it. So a first start compiles only what its model calls."""

SHARED: Final = ("team.cpp", "lease.cpp", "plan.cpp")
"""Sources that are compiled into each part, too: with them its kernels distribute their tasks."""

FLAGS: Final = "-O3 -std=c++17 -fPIC -fvisibility=hidden -pthread -fno-math-errno -fno-trapping-math -ffp-contract=off"
"""Flags with which sums keep their written order, and a product is fused with a sum only where the source says `fma`.
So a row's result depends neither on which loop a compiler made of it nor on which compiler that was."""

COMPILE_TIMEOUT_S: Final = 120.0

ABANDONED_S: Final = 3600.0
"""Age in seconds from which on a build was killed: its two rounds of compiler runs are timed out long before."""

MAIN: Final = "kernels"
"""Prefix of the names of libraries. Names of parts have the part's name after it."""

LOCK: Final = ".build.lock"
"""The file that a process locks while it builds."""

LOCKED_S: Final = 2 * COMPILE_TIMEOUT_S
"""Seconds for which the lock is waited for. By then its holder's compiler runs are timed out, or it is frozen."""

LOOK_S: Final = 0.1
"""Seconds between two looks at the lock."""


@dataclass(frozen=True, slots=True, eq=False)
class Kernels:
    """A loaded library. Each kernel's own module declares the functions that it calls."""

    library: ctypes.CDLL
    variant: str
    build: str
    """Name of the build: sources and flags, machine, and compiler. Only equal libraries have the same name."""
    reason: str = ""
    """The reason for this variant, where it was chosen among several."""
    parts: dict[str, ctypes.CDLL] = field(default_factory=dict)
    """The loaded parts by name. `need` adds them."""

    def function(self, name: str, arguments: tuple[Any, ...], result: Any = None) -> Callable[..., Any]:
        """Returns the exported C function `name`, which from here on checks and converts its arguments."""
        function = self.library[name]
        function.argtypes = list(arguments)
        function.restype = result
        return function

    def need(self, part: str) -> None:
        """Loads the kernels of a folder of `SOURCES`, and builds them first if need be. It must run before anything
        calls them.

        Raises ConfigError where they cannot be built.
        """
        if part in self.parts:
            return
        library = Path(self.library._name)
        path = library.with_name(library.name.replace(MAIN, f"{MAIN}_{part}", 1))
        try:
            if not _is_loadable(path):
                _build_part(path, self, part)
            loaded = ctypes.CDLL(str(path))
        except (OSError, subprocess.SubprocessError) as error:
            raise ConfigError(f"the native kernels need {path.name}, which cannot be built: {error}") from error
        of_main = self.library["twostroke_parts"]
        of_main.restype = ctypes.c_void_p
        loaded["twostroke_join"](ctypes.c_void_p(of_main()))
        self.parts[part] = loaded


def load_kernels(folder: Path, variants: Sequence[Variant] | None = None) -> Kernels | None:
    """Returns the library of the first of `variants` that exists or can be built in `folder`; None where none can.

    `variants` are by default those that this CPU can run, the preferred one first. It logs one warning where it returns
    another than the first.
    """
    problem = ""
    for variant in chosen_variants() if variants is None else variants:
        try:
            kernels = load_variant(folder, variant)
        except (OSError, subprocess.SubprocessError) as error:
            problem = problem or str(error)
            if isinstance(error, subprocess.TimeoutExpired):
                break
        else:
            if problem:
                log.warning("slower native kernels than this CPU can run: variant=%s error=%s", variant.name, problem)
            return kernels
    if problem:
        log.warning("no native kernels, the engine will be slow: error=%s", problem)
    return None


def load_variant(folder: Path, variant: Variant) -> Kernels:
    """Returns the library of a variant, built if need be. Raises OSError or SubprocessError where it cannot be
    built."""
    path = _built(folder, variant)
    return Kernels(ctypes.CDLL(str(path)), variant.name, path.stem)


def build_all(folder: Path) -> None:
    """Builds libraries for all CPUs of this architecture, for machines without a compiler. Raises OSError if there is
    none here."""
    compiler = find_compiler()
    for variant in VARIANTS:
        if variant.machine in {"", os.uname().machine}:
            for part in ("", *(each.name for each in sorted(SOURCES.iterdir()) if each.is_dir())):
                _compile(folder / f"{_stem(variant, part)}-{compiler.name}.so", variant, compiler, part)


def arithmetic_identity(kernels: Kernels | None) -> str:
    """Returns a digest of CPU, kernels and torch. Workers with the same one compute with the same instructions and
    libraries."""
    facts = ("" if kernels is None else kernels.build, os.uname().machine, cpu_features(), version("torch"))
    return hashlib.blake2b("\0".join(facts).encode(), digest_size=6).hexdigest()


@dataclass(frozen=True, slots=True)
class Compiler:
    command: tuple[str, ...]
    name: str
    """Kind, version and a digest of the defaults, usable in file names: "gcc-12.2.0-1f0c9a2b4d6e8071"."""


def find_compiler() -> Compiler:
    """Returns $CXX, else the first C++ compiler on the path. Raises OSError where there is none, or where it does not
    work."""
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
    options = "\0".join([*command[1:], macros])  # $CXX may have options: those that change no macro count, too
    defaults = hashlib.blake2b(options.encode(), digest_size=8).hexdigest()
    return Compiler(tuple(command), f"{kind}-{re.sub('[^0-9A-Za-z.]+', '_', version[1])}-{defaults}")


def _built(folder: Path, variant: Variant) -> Path:
    """Returns a variant's library. It is built unless an earlier one can be loaded, which a machine's crash may have
    damaged.

    Without a compiler, it returns a library that another machine has built, as images contain.
    """
    try:
        compiler = find_compiler()
    except (OSError, subprocess.SubprocessError):
        for library in sorted(folder.glob(f"{_stem(variant)}-*.so")):
            check_cache(library)
            return library
        raise
    library = folder / f"{_stem(variant)}-{compiler.name}.so"
    if not _is_loadable(library):
        with _only_builder(folder):
            if not _is_loadable(library):  # no other process has built it meanwhile
                _compile(library, variant, compiler)
    return library


def _build_part(path: Path, kernels: Kernels, part: str) -> None:
    """Builds a part of a library, by the same compiler as that: both must lay out shared structs alike."""
    variant = next(each for each in VARIANTS if each.name == kernels.variant)
    compiler = find_compiler()
    if path.stem != f"{_stem(variant, part)}-{compiler.name}":
        raise OSError(f"another compiler or other sources than those of {kernels.build} are here")
    with _only_builder(path.parent):
        if not _is_loadable(path):  # no other process has built it meanwhile
            _compile(path, variant, compiler, part)


@contextlib.contextmanager
def _only_builder(folder: Path) -> Iterator[None]:
    """Waits until no other process builds. Workers that start together would take each other's cores, and time out.

    After waiting too long, this process builds at the same time, which harms neither.
    """
    make_folder(folder)
    check_cache(folder)
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
    """Returns whether a library exists and loads. Raises UntrustedPath where other users may have written it: loading
    runs its code."""
    try:
        check_cache(library)
    except FileNotFoundError:
        return False
    try:
        ctypes.CDLL(str(library))
    except OSError:
        return False
    return True


def _stem(variant: Variant, part: str = "") -> str:
    """Returns the start of the file name of the library, or of a part of it.

    A library is only used for exactly these sources and flags. It runs on every machine of this architecture whose CPU
    has the instructions of the variant. A folder may be shared by machines of several architectures.
    """
    name = f"{MAIN}_{part}" if part else MAIN
    return f"{name}-{variant.name}-{os.uname().machine}-{source_key(variant)}"


def source_key(variant: Variant) -> str:
    """Returns the key of a variant's library without its compiler: a digest of sources, flags, and how it is built."""
    files = sorted(path for path in SOURCES.rglob("*") if path.suffix in {".h", ".cpp"})
    sources = content_digest((str(path.relative_to(SOURCES)), path) for path in files)
    return cache_key("native kernels", sources=sources, flags=FLAGS, variant_flags=variant.flags)


def _sources(part: str) -> list[Path]:
    shared = [SOURCES / name for name in SHARED] if part else []
    return [*sorted((SOURCES / part).glob("*.cpp")), *shared]


def _compile(library: Path, variant: Variant, compiler: Compiler, part: str = "") -> None:
    """Compiles into another file and renames it, so that no process loads a part of a file."""
    command = compiler.command
    make_folder(library.parent)  # `build_all` does not hold the lock
    _remove_abandoned(library.parent)
    with tempfile.TemporaryDirectory(prefix=".build-", dir=library.parent) as scratch:
        flags = [*FLAGS.split(), *variant.flags.split(), f"-I{SOURCES}"]
        sources = _sources(part)
        objects = [str(Path(scratch) / f"{source.stem}.o") for source in sources]
        jobs = [
            [*command, *flags, "-c", str(source), "-o", made] for source, made in zip(sources, objects, strict=True)
        ]
        with ThreadPoolExecutor(os.cpu_count() or 1) as workers:
            list(workers.map(_run, jobs))
        built = Path(scratch) / library.name
        _run([*command, *flags, "-shared", *objects, "-o", str(built)])
        built.chmod(OURS_TO_WRITE)  # the compiler applies the umask
        built.rename(library)
        log.info("native kernels built path=%s variant=%s", library, variant.name)


def _remove_abandoned(folder: Path) -> None:
    for scratch in folder.glob(".build-*"):
        with contextlib.suppress(FileNotFoundError):
            if time.time() - scratch.stat().st_mtime > ABANDONED_S:
                shutil.rmtree(scratch, ignore_errors=True)


def _run(arguments: list[str]) -> str:
    """Runs a command, and returns its output. A compiler that hangs is killed together with the processes that it
    started."""
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            arguments, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
        try:
            code = process.wait(COMPILE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise
        output.seek(0)
        text = output.read().decode(errors="replace")
        if code != 0:
            raise OSError(f"{shlex.join(arguments)} failed: {text.strip()[-500:]}")
        return text
