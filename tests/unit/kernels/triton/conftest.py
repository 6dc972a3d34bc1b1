"""The Triton kernels for Triton's interpreter, which runs them on a CPU, one program after the other.

Whether a kernel is interpreted is decided when it is defined, so they are imported here for the first time; the
variable is set only then and while these tests run, so that no other test nor its subprocesses see it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

with pytest.MonkeyPatch.context() as patch:
    patch.setenv("TRITON_INTERPRET", "1")
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder

    import twostroke.kernels.triton.attention
    import twostroke.kernels.triton.codes
    import twostroke.kernels.triton.elementwise
    import twostroke.kernels.triton.grouped
    import twostroke.kernels.triton.page_forms.nibble_attention  # noqa: F401

multiply = InterpreterBuilder.create_dot


def multiply_bfloat16_too(self: InterpreterBuilder, a: Any, b: Any, *rest: Any) -> Any:
    """The interpreter holds bfloat16 as the integers of its bits, and its matrix product takes them for numbers."""
    a, b = (self.create_fp_ext(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b))
    return multiply(self, a, b, *rest)


@pytest.fixture(scope="module", autouse=True)
def interpreter() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        patch.setattr(InterpreterBuilder, "create_dot", multiply_bfloat16_too)
        yield
