"""The meeting of ranks that sum over torch's process groups."""

from __future__ import annotations

import subprocess
import sys
from typing import Final

LEFT: Final = """
import fcntl, gc, os, sys, tempfile
import torch
from torch import distributed
from twostroke.ranks.collectives import Meeting, leave_group

fd = os.memfd_create("meeting", os.MFD_CLOEXEC)
Meeting(fd, 0, 1).join(torch.device("cpu"))
work = distributed.all_reduce(torch.ones(2), async_op=True)
work.wait()
leave_group()
os.close(fd)
with tempfile.NamedTemporaryFile() as other, open(other.name) as again:
    if fd not in (other.fileno(), again.fileno()):
        os.dup2(other.fileno(), fd)
    fcntl.flock(other, fcntl.LOCK_EX)
    del work
    gc.collect()
    print(os.path.getsize(other.name))
"""
"""A sum whose group was left is destroyed while another file has the number of the meeting's descriptor, locked."""


def test_what_is_left_of_a_group_touches_no_file_that_is_opened_later() -> None:
    done = subprocess.run([sys.executable, "-c", LEFT], check=False, capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.returncode) == ("0\n", 0), done.stderr
