"""`python -m twostroke.kernels.cpu FOLDER` builds all libraries in the folder, for images that have no compiler."""

from __future__ import annotations

import sys
from pathlib import Path

from twostroke.kernels.cpu.build import build_all

if __name__ == "__main__":
    build_all(Path(sys.argv[1]))
