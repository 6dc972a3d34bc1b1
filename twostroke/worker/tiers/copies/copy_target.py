"""Room for a page on its way to a lower tier."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class CopyTarget:
    """Room for one page on its way to a lower tier; either `commit` or `cancel` is called."""

    data: npt.NDArray[np.uint8]
    commit: Callable[[bytes], None]
    """Called with the digest of the bytes that are in `data` now."""
    cancel: Callable[[], None]
