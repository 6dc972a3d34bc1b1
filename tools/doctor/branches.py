"""The table of what features have to say of a worker, by its name in the doctor's JSON: one line for each."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tools.doctor.facts import FurtherFacts, Samples
from tools.doctor.speculation import speculation_of

READERS: Mapping[str, Callable[[Samples, str], FurtherFacts | None]] = {"speculation": speculation_of}
"""Each reads the metrics page of a worker, which has a role. The page is empty where it cannot be read."""
