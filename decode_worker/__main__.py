"""`python -m decode_worker`: a decode worker without Ray."""

import sys

from decode_worker.worker import DecodeWorker
from twostroke.worker.process import main

sys.exit(main(DecodeWorker))
