"""`python -m tests.cluster.device_decode_worker`: a decode worker on devices, whose place the CPU takes."""

from __future__ import annotations

import os
import sys

from decode_worker.worker import DecodeWorker
from tests.unit.engine.host_devices import take_the_devices_place
from twostroke.kernels.cpu.variants import OVERRIDE
from twostroke.worker.process import main

if __name__ == "__main__":
    os.environ.pop(OVERRIDE, None)  # it is for workers that compute on the CPU
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    take_the_devices_place(setattr)
    sys.exit(main(DecodeWorker))
