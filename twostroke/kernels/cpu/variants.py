"""The builds of the native kernels for families of CPUs, and those that this machine can run."""

from __future__ import annotations

import ctypes
import functools
import logging
import os
from dataclasses import dataclass
from typing import Final

from twostroke.base.errors import ConfigError

log = logging.getLogger(__name__)

OVERRIDE: Final = "TWOSTROKE_CPU_KERNELS"
"""Variable of the environment that names a variant, or `TORCH`, in place of the fastest one on this machine."""

TORCH: Final = "torch"


@dataclass(frozen=True, slots=True)
class Variant:
    """One build of all kernels for one family of CPUs."""

    name: str
    machine: str
    """The architecture, spelled as by uname; empty for all of them."""
    flags: str
    needs: frozenset[str]
    """Features that the processor must have, spelled as by `cpu_features`."""


_AVX2: Final = frozenset({"avx2", "fma", "f16c"})
_AVX512: Final = _AVX2 | {"avx512f", "avx512bw", "avx512vl", "avx512dq"}
_AVX512_BF16: Final = _AVX512 | {"avx512_bf16", "avx512_vnni"}
TILES: Final = frozenset({"amx_tile", "amx_bf16", "amx_int8"})

_AVX2_FLAGS: Final = "-mavx2 -mfma -mf16c"
_AVX512_FLAGS: Final = f"-mavx512f -mavx512bw -mavx512vl -mavx512dq {_AVX2_FLAGS} -mprefer-vector-width=512"
_AVX512_BF16_FLAGS: Final = f"{_AVX512_FLAGS} -mavx512bf16 -mavx512vnni"

VARIANTS: Final = (
    Variant("amx", "x86_64", f"{_AVX512_BF16_FLAGS} -mamx-tile -mamx-bf16 -mamx-int8", _AVX512_BF16 | TILES),
    Variant("avx512_bf16", "x86_64", _AVX512_BF16_FLAGS, _AVX512_BF16),
    Variant("avx512", "x86_64", _AVX512_FLAGS, _AVX512),
    Variant("avx2", "x86_64", _AVX2_FLAGS, _AVX2),
    Variant(
        "sve256_bf16",
        "aarch64",
        "-march=armv8.2-a+sve+bf16 -msve-vector-bits=256",
        frozenset({"sve", "svebf16", "sve256"}),
    ),
    Variant("neon_bf16", "aarch64", "-march=armv8.2-a+bf16+dotprod", frozenset({"bf16", "asimddp"})),
    Variant("sve512", "aarch64", "-march=armv8.2-a+sve -msve-vector-bits=512", frozenset({"sve", "sve512"})),
    Variant("portable", "", "", frozenset()),
)
"""All variants, the preferred ones first."""


def chosen_variants() -> tuple[Variant, ...]:
    """Returns the variants to try in turn: all that this CPU can run, or the one that `OVERRIDE` names; none where it
    names torch."""
    features = usable_features()
    able = tuple(variant for variant in VARIANTS if variant.needs <= features)
    asked = os.environ.get(OVERRIDE)
    if not asked:
        return able
    if asked == TORCH:
        return ()
    chosen = tuple(variant for variant in able if variant.name == asked)
    if not chosen:
        choices = ", ".join([*(variant.name for variant in able), TORCH])
        raise ConfigError(f"{OVERRIDE}={asked} is not what this CPU can run; it can run: {choices}", field=OVERRIDE)
    return chosen


def is_overridden() -> bool:
    """Returns whether the user has chosen a variant, or torch."""
    return bool(os.environ.get(OVERRIDE))


def usable_features() -> frozenset[str]:
    """Returns the features that the processor has and the system lets this process use."""
    features = frozenset(cpu_features().split())
    if features >= TILES and not may_use_tiles():
        features -= TILES
    return features


def cpu_features() -> str:
    """Returns the line of /proc/cpuinfo that lists instruction sets: "flags" on x86, "Features" on ARM.

    ARM's line names SVE without its width: "sve256" is added for vectors of 256 bits.
    """
    line = _fact_of_cpu("flags", "features") or os.uname().machine
    return f"{line} sve{_sve_bits()}" if "sve" in line.split() else line


def cpu_model() -> str:
    """Returns the processor's name; on ARM, which has none, the numbers of its maker and its kind."""
    return _fact_of_cpu("model name") or f"{_fact_of_cpu('cpu implementer')} {_fact_of_cpu('cpu part')}"


def _fact_of_cpu(*keys: str) -> str:
    """Returns the first line of /proc/cpuinfo under one of these names, or nothing."""
    with open("/proc/cpuinfo", encoding="utf-8") as lines:
        return next((line.strip() for line in lines if line.lower().startswith(keys)), "")


_ARCH_PRCTL: Final = 158
_ARCH_REQ_XCOMP_PERM: Final = 0x1023
_XFEATURE_XTILEDATA: Final = 18
"""The system call, the request and the state of asm/prctl.h and of Documentation/arch/x86/xstate.rst of Linux 5.16."""


@functools.cache
def may_use_tiles() -> bool:
    """Requests AMX's tile state from Linux for all threads of this process, and returns whether it is granted.

    It is refused by Linux before 5.16, and where a thread has a signal stack too small for the state. A refusal is
    logged once.
    """
    system = ctypes.CDLL(None, use_errno=True)
    if system.syscall(_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA) == 0:
        return True
    log.warning("the system does not let AMX be used: error=%s", os.strerror(ctypes.get_errno()))
    return False


_PR_SVE_GET_VL: Final = 51
_VECTOR_BYTES: Final = 0xFFFF
"""The request of prctl, and the bits of its result that hold the length: linux/prctl.h."""


def _sve_bits() -> int:
    answer: int = ctypes.CDLL(None).prctl(_PR_SVE_GET_VL)
    return 8 * (answer & _VECTOR_BYTES)
