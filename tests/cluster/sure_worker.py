"""`python -m tests.cluster.sure_worker`: a decode worker whose draft model draws at every step of every answer."""

from __future__ import annotations

import sys

from decode_worker import speculations
from decode_worker.worker import DecodeWorker
from tests.sure_drafts import SureSpeculation, always
from twostroke.worker.drafts import model_drafts
from twostroke.worker.process import main

if __name__ == "__main__":
    speculations.Speculation = SureSpeculation  # type: ignore[misc]  # imported there
    model_drafts.model_lengths = always
    model_drafts.pays_catching_up = lambda *_prices: True
    sys.exit(main(DecodeWorker))
