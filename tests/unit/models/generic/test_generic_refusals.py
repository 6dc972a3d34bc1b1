"""Models that cannot be served over pages are refused by name, in one line, from their config alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

import pytest
import transformers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.unit.models.generic_configs import GENERIC, OPT, SIZES
from twostroke.base.errors import UnsupportedModel
from twostroke.models.registry import read_spec

DYNAMIC: Final = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
REFUSED: Final[dict[str, tuple[PreTrainedConfig, str]]] = {
    "state space": (transformers.MambaConfig(), "MambaForCausalLM, which keeps a state instead of pages"),
    "hybrid": (transformers.JambaConfig(), "JambaForCausalLM, which keeps a state instead of pages"),
    "linear attention": (transformers.RwkvConfig(), "RwkvForCausalLM, which keeps a state instead of pages"),
    "encoder-decoder": (transformers.T5Config(), "T5ForConditionalGeneration, an encoder-decoder"),
    "decoder of an encoder-decoder": (transformers.BartConfig(), "an encoder-decoder"),
    "text and images": (transformers.LlavaConfig(), "a wrapper of a text model with other inputs"),
    "alibi": (transformers.BloomConfig(), "BloomForCausalLM, whose code takes no position_ids (alibi"),
    "attention of its own": (
        transformers.GPTJConfig(n_embd=64, n_layer=2, n_head=4, rotary_dim=16),
        "GPTJForCausalLM, whose code does not run with attention over pages",
    ),
    "an encoder": (transformers.BertConfig(), "a mask that is neither causal nor a window"),
    "chunks": (
        transformers.Llama4TextConfig(**SIZES, head_dim=16, attention_chunk_size=32, moe_layers=[]),
        "layer_types 'chunked_attention', which keeps no pages",
    ),
    "heads of several widths": (
        transformers.Gemma4TextConfig(**SIZES, head_dim=16, global_head_dim=32),
        "Gemma4ForCausalLM, whose layers have heads of different numbers or widths",
    ),
    "calls attention twice": (transformers.DiffLlamaConfig(**SIZES), "which calls attention 4 times in 2 layers"),
    "a rope that changes with the length": (
        transformers.StableLmConfig(**SIZES, rope_parameters=DYNAMIC),
        "rope type 'dynamic', which changes with the longest sequence of a step",
    ),
    "quantised": (transformers.OPTConfig(**OPT, quantization_config={"quant_method": "awq"}), "quantised weights"),
    "no causal language model": (
        transformers.OPTConfig(**OPT, architectures=["OPTForSequenceClassification"]),
        "OPTForSequenceClassification, which is not a causal language model of transformers",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_pages_is_refused_by_name(name: str, tmp_path: Path) -> None:
    config, said = REFUSED[name]
    if not config.architectures:
        known = AutoModelForCausalLM._model_mapping.get(type(config), None)
        by_hand = {"t5": "T5ForConditionalGeneration", "llava": "LlavaForConditionalGeneration"}
        config.architectures = [by_hand.get(config.model_type, getattr(known, "__name__", ""))]
    config.save_pretrained(tmp_path)
    _refused(tmp_path, said)


def test_code_that_comes_with_a_model_is_never_run(tmp_path: Path) -> None:
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Config: pass\n")
    config = {"model_type": "evil", "architectures": ["Evil"], "auto_map": {"AutoConfig": "evil.Config"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    _refused(tmp_path, "code that comes with a model (auto_map), which is never run,")
    assert not (tmp_path / "ran").exists()


def _refused(directory: Path, said: str) -> None:
    with pytest.raises(UnsupportedModel) as refusal:
        read_spec(directory)
    assert said in refusal.value.message
    assert "is not supported. Supported: " in refusal.value.message
    assert "\n" not in refusal.value.message


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_causal_model_of_transformers_is_served_or_refused_in_one_line(tmp_path: Path) -> None:
    served, refusals = [], []
    for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        try:
            CONFIG_MAPPING[kind]().save_pretrained(tmp_path / kind)
        except Exception:  # some configs have no defaults
            continue
        try:
            served.append(read_spec(tmp_path / kind, 64, "transformers").architecture)
        except UnsupportedModel as refusal:
            refusals.append(refusal.message)
    print(len(served), *served)
    assert len(served) >= 60
    assert not [line for line in refusals if "\n" in line]
    assert {type(AutoModelForCausalLM.from_config(config)).__name__ for config in GENERIC.values()} <= set(served)
