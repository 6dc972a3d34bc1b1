"""The flags of `tests.trials.bench index`."""

from __future__ import annotations

import argparse
import os
import shutil
from typing import Any

from cluster.flags.checks import file_can_be_made
from tests.trials.bench.index.content import DEEP_BLOCKS
from tests.trials.bench.options import json_file
from twostroke.base.errors import ConfigError
from twostroke.config import flags
from twostroke.config.settings import Settings, group, setting


class IndexOptions(Settings):
    workers: int = setting(64, least=3, help="workers that hold blocks")
    blocks: int = setting(1_000_000, least=10 * DEEP_BLOCKS, help="different blocks")
    lookups: int = setting(2000, least=2, help="lookups of each kind")
    seed: int = setting(0, help="seed of hashes and questions")
    dynamo_python: str | None = setting(
        None, unit="PROGRAM", help="Python that has ai-dynamo-runtime: its radix tree is measured, too"
    )
    json_path: str | None = json_file()

    def model_post_init(self, _context: Any) -> None:
        file_can_be_made("--json", self.json_path)
        if self.dynamo_python is not None and shutil.which(self.dynamo_python) is None:
            raise ConfigError(f"--dynamo-python {self.dynamo_python}: is not a program", field="--dynamo-python")

    @property
    def dynamo_program(self) -> str | None:
        """The program as other working directories see it."""
        python = self.dynamo_python
        return os.path.abspath(python) if python is not None and os.sep in python else python


class _Flags(Settings):
    options: IndexOptions = group(IndexOptions, "index")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flags.add(parser, _Flags)


def options_from(args: argparse.Namespace) -> IndexOptions:
    return flags.read(_Flags, args).options
