"""`python -m tests.cluster.sure_worker`: a decode worker whose draft model draws at every step of every answer.

It draws whatever that costs, and however often it was wrong.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from decode_worker import speculations
from decode_worker.worker import DecodeWorker
from twostroke.scheduler.model_drafting import Asking, Lengths
from twostroke.speculation.speculation import Speculation
from twostroke.worker.process import main
from twostroke.worker.steps import model_drafts

LENGTH = 2
"""Tokens of each draft."""


class SureSpeculation(Speculation):
    def _chance(self, kind: str) -> float:
        return 0.9


def always(asking: Sequence[Asking], *_prices: Any) -> Lengths:
    return Lengths(tuple(min(LENGTH, each.most) for each in asking), float(len(asking)))


if __name__ == "__main__":
    speculations.Speculation = SureSpeculation  # type: ignore[misc]  # imported there
    model_drafts.model_lengths = always
    model_drafts.pays_catching_up = lambda *_prices: True
    sys.exit(main(DecodeWorker))
