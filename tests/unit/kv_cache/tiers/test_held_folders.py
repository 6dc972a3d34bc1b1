"""A worker that is asleep holds its folders of pages."""

from __future__ import annotations

import os
import time
from pathlib import Path

from twostroke.kv_cache.tiers.folders import LOCK, claim_left, claim_own, hold_own, model_folder, remove_unused

WORKER = "decode-1"
MODELS = (b"\x01" * 16, b"\x02" * 16)


def left(root: Path, worker: str, identity: bytes) -> Path:
    """A folder whose owner was last seen an hour ago."""
    folder = claim_own(model_folder(root, identity), worker)
    folder.close()
    old = time.time() - 3600
    os.utime(folder.path / LOCK, (old, old))
    return folder.path


def test_nobody_adopts_or_removes_the_pages_of_a_worker_that_is_asleep(tmp_path: Path) -> None:
    own = [left(tmp_path, WORKER, identity) for identity in MODELS]
    other = left(tmp_path, "decode-10", MODELS[0])
    held = hold_own(tmp_path, WORKER)
    assert [folder.path for folder in held] == own
    for path in own:
        old = time.time() - 3600
        os.utime(path / LOCK, (old, old))
    adopted = list(claim_left(model_folder(tmp_path, MODELS[0]), unseen_s=90))
    assert [folder.path for folder in adopted] == [other]
    remove_unused(tmp_path, kept=(), unseen_s=90)
    assert all(path.exists() for path in own)
    for folder in (*held, *adopted):
        folder.close()
    awake = claim_own(model_folder(tmp_path, MODELS[0]), WORKER)
    assert awake.path == own[0]
    awake.close()


def test_a_worker_without_pages_holds_none(tmp_path: Path) -> None:
    assert hold_own(tmp_path / "nothing", WORKER) == []
