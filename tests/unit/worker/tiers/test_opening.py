"""Opening the disk tier: whose records a worker reads."""

from __future__ import annotations

from pathlib import Path

import pytest

from twostroke.base.errors import ConfigError
from twostroke.config import CacheConfig
from twostroke.engine.backends.facts import LoadedModel
from twostroke.kv_cache.form import KvForm
from twostroke.worker.tiers.opening import open_disk


def folder_of(root: Path, form: KvForm, fingerprint: str = "model=m") -> Path:
    facts = LoadedModel(
        name="m",
        max_model_len=64,
        vocab_size=100,
        eos_token_ids=(),
        dtype="bfloat16",
        kv_form=form,
        block_size=16,
        page_bytes=4096,
        pages=8,
        advice="",
        fingerprint=fingerprint,
    )
    opened = open_disk(CacheConfig(disk_cache_bytes=1 << 20, disk_cache_dir=str(root)), "decode-0", facts)
    assert opened is not None
    opened.own.close()
    return opened.own.path


def test_records_of_another_form_are_never_read_though_the_fingerprint_and_the_size_are_the_same(
    tmp_path: Path,
) -> None:
    forms = (KvForm("int8"), KvForm("int8", "bfloat16"), KvForm("fp8_e4m3"), KvForm("int8", "float32"))
    folders = {folder_of(tmp_path, form) for form in forms}
    assert len(folders) == len(forms)
    assert folder_of(tmp_path, forms[1]) in folders
    assert folder_of(tmp_path, forms[1], "model=n") not in folders


def test_a_root_in_which_everybody_can_replace_folders_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(ConfigError, match=f"--disk-cache-dir {tmp_path} can be written by everybody"):
        folder_of(tmp_path, KvForm("int8"))
    tmp_path.chmod(0o700)
