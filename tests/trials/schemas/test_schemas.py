"""Schemas of a public benchmark: none is answered with what violates it.

sample.jsonl: schemas of MaskBench (guidance-ai/jsonschemabench): its own handwritten and synthesized ones (MIT), and
some that it took from the Berkeley Function Calling Leaderboard, Kubernetes and Snowplow's registry (Apache-2.0).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.trials.schemas.bed import Bed, entries

SAMPLE = Path(__file__).with_name("sample.jsonl")
WHOLE = Path(__file__).parents[4] / "shared" / "specs" / "json-schemas.jsonl.gz"


def test_no_answer_violates_a_schema_of_the_sample(smollm2_dir: Path) -> None:
    bed = Bed(str(smollm2_dir), seed=1)
    for entry in entries(SAMPLE):
        bed.try_schema(entry, is_strict=True, walks=3)
    tally = bed.tally
    assert not tally.problems, "\n".join(tally.problems)
    assert tally.compiled > 60
    assert tally.refused["not"] > 5
    assert tally.valid > 60
    assert tally.invalid > 10
    assert tally.unfinished < tally.walks / 4


@pytest.mark.slow
@pytest.mark.skipif(not WHOLE.is_file(), reason="the whole set lies in ../shared")
def test_no_answer_violates_a_schema_of_the_whole_set(smollm2_dir: Path) -> None:
    bed = Bed(str(smollm2_dir), seed=2)
    for entry in entries(WHOLE):
        bed.try_schema(entry, is_strict=True, walks=2)
    assert not bed.tally.problems, "\n".join(bed.tally.problems)
