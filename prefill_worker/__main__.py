"""`python -m prefill_worker`: a prefill worker without Ray."""

import sys

from prefill_worker.worker import PrefillWorker
from twostroke.worker.process import main

sys.exit(main(PrefillWorker))
