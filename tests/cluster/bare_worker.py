"""`python -m tests.cluster.bare_worker`: a worker of either role with an empty table of branches."""

from __future__ import annotations

import sys

from decode_worker.worker import DecodeWorker
from prefill_worker.worker import PrefillWorker
from twostroke.config import Role, WorkerConfig
from twostroke.worker.process import main
from twostroke.worker.worker import BaseWorker


def bare_worker(config: WorkerConfig) -> BaseWorker:
    role = PrefillWorker if config.role is Role.PREFILL else DecodeWorker
    return role(config, branches=())


if __name__ == "__main__":
    sys.exit(main(bare_worker))
