"""`python -m tests.cluster.sure_worker`: a decode worker whose draft model draws however often it was wrong."""

from __future__ import annotations

import sys

from decode_worker import speculations
from decode_worker.worker import DecodeWorker
from twostroke.speculation.speculation import Speculation
from twostroke.worker.process import main


class SureSpeculation(Speculation):
    @property
    def model_chance(self) -> float:
        return 0.9


if __name__ == "__main__":
    speculations.Speculation = SureSpeculation  # type: ignore[misc]  # imported there
    sys.exit(main(DecodeWorker))
