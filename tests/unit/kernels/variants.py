"""The builds of the native kernels that tests run: in the gate those that workers of this machine choose between.

Every other one takes a compiler a minute and a half, and has the same sources: `make slow` runs them. Parts, which are
compiled when something needs them, are run by the gate in the preferred build alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Generic, TypeVar

import pytest

from twostroke.kernels.cpu.build import Kernels, load_kernels
from twostroke.kernels.cpu.choice import CONTENDERS
from twostroke.kernels.cpu.variants import OVERRIDE, chosen_variants
from twostroke.models.catalog.places import cache_dir

VARIANTS = [variant.name for variant in chosen_variants()]
"""All that this CPU can run, in the order in which they are preferred."""
IN_GATE = [variant.name for variant in chosen_variants() if variant.needs][:CONTENDERS] or VARIANTS
LATER = [name for name in VARIANTS if name not in IN_GATE]
PARTS_IN_GATE = IN_GATE[:1]
LATER_OF_PARTS = [name for name in VARIANTS if name not in PARTS_IN_GATE]


Made = TypeVar("Made")


class EachVariant(Mapping[str, Made], Generic[Made]):
    """Something of each variant, made when it is asked for."""

    def __init__(self, make: Callable[[str], Made]) -> None:
        self._make = make
        self.made: dict[str, Made] = {}

    def __getitem__(self, name: str) -> Made:
        if name not in VARIANTS:
            raise KeyError(name)
        if name not in self.made:
            self.made[name] = self._make(name)
        return self.made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(VARIANTS)

    def __len__(self) -> int:
        return len(VARIANTS)


def built(name: str) -> Kernels:
    """Returns the variant's library out of the user's cache, where workers look, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(OVERRIDE, name)
        kernels = load_kernels(cache_dir() / "kernels")
    assert kernels is not None, "the gate's machine has a compiler"
    return kernels


def mark_others_slow(items: Sequence[pytest.Item]) -> None:
    """Leaves to the slow suite each test of a variant that is not the gate's."""
    for item in items:
        fixtures = getattr(item, "fixturenames", ())
        if "built_kernels" in fixtures and isinstance(item, pytest.Function):
            later = LATER_OF_PARTS if "built_parts" in fixtures else LATER
            values = item.callspec.params.values() if hasattr(item, "callspec") else ()
            if any(value in later for value in values if isinstance(value, str)):
                item.add_marker(pytest.mark.slow)
