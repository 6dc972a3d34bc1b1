"""`tests.bench forms`: what is compared, a whole run over a tiny model, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig

from tests.bench.forms import run
from tests.bench.forms.options import options_from
from tests.bench.forms.quality import compare
from twostroke.config.cache import KV_FORMATS
from twostroke.errors import ConfigError
from twostroke.kernels.page_pool import BYTES

WORDS = 64
TINY = LlamaConfig(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=WORDS,
    max_position_embeddings=2048,
    eos_token_id=2,
)


class Predicts:
    """A model that says the same at every position."""

    def __init__(self, *logits: float) -> None:
        self._row = torch.tensor(logits).log_softmax(0)

    def log_probabilities(self, tokens: torch.Tensor) -> Any:
        for start in range(0, len(tokens), 256):
            yield self._row.expand(min(256, len(tokens) - start), -1)


def test_every_position_but_the_last_counts_once_and_distance_is_from_the_exact_model() -> None:
    window = torch.zeros(300, dtype=torch.int64)
    other: Any = Predicts(0.0, 1.0)
    exact: Any = Predicts(2.0, 0.0)
    found = compare(exact, {"equal": exact, "other": other}, [window, window])
    sure = float(torch.tensor([2.0, 0.0]).log_softmax(0)[0])
    assert found[""] == pytest.approx([-sure, 0.0, 1.0])
    assert found["equal"] == pytest.approx(found[""])
    assert found["other"][0] == pytest.approx(-float(torch.tensor([0.0, 1.0]).log_softmax(0)[0]))
    assert found["other"][1] > 0.5
    assert found["other"][2] == 0.0


def test_every_form_is_compared_over_the_same_text(arguments: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(TINY).save_pretrained(tmp_path / "tiny")
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(WORDS)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tiny" / "tokenizer.json"))
    text = tmp_path / "text"
    text.write_text(" ".join(f"w{i * i % WORDS}" for i in range(700)))
    out = tmp_path / "forms.json"
    flags = ("--model", str(tmp_path / "tiny"), "--text", str(text), "--windows", "2", "--window-tokens", "300")
    assert run(arguments("forms", *flags, "--json", str(out))) == 0
    exact, *others = json.loads(out.read_text())["results"]
    assert exact["form"] == "bfloat16"
    mixed = {f"{form} from bfloat16" for form in BYTES}
    assert {each["form"] for each in others} == (set(KV_FORMATS) - {"bfloat16"}) | mixed
    for form in BYTES:
        pure, converted = (next(e for e in others if e["form"] == name) for name in (form, f"{form} from bfloat16"))
        assert pure["page_bytes"] == converted["page_bytes"]
        assert pure["mean_kl"] != converted["mean_kl"], "earlier chunks were computed in another form"
    for each in others:
        assert 0.95 < each["perplexity"] / exact["perplexity"] < 1.05
        assert 0 <= each["mean_kl"] < 1e-2
    with pytest.raises(ConfigError, match=r"--text has 700 tokens, 3 windows of 300 need 900"):
        run(arguments("forms", *flags, "--windows", "3"))


@pytest.mark.parametrize(
    ("flags", "field"),
    [
        (["--forms", "int3"], "forms"),
        (["--forms", ""], "forms"),
        (["--model", "paced:"], "model"),
        (["--text", "/no/such/text"], "text"),
        (["--windows", "0"], "windows"),
        (["--window-tokens", "1"], "window"),
        (["--json", "/no/such/directory/forms.json"], "json"),
    ],
)
def test_a_wrong_flag_is_refused_by_name(arguments: Any, flags: list[str], field: str) -> None:
    with pytest.raises(ConfigError, match=f"--{field}") as caught:
        options_from(arguments("forms", *flags))
    assert caught.value.field is not None
    assert caught.value.field.removeprefix("--") == field
