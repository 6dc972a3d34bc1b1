"""What transformers says: greedy continuations of the default model in float32, with the gap of its top two logits.

`python -m tests.cluster.reference MODEL_DIR` records it, for another default model or other prompts.
"""

from __future__ import annotations

import json
import random
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

RECORDED = Path(__file__).with_name("references.json")
NEW_TOKENS = 16
NEAR_TIE = 1e-4
"""Rounding decides where the reference's top two logits are closer than this: it is listed, and is no failure."""

LENGTHS = (1, 15, 16, 17, 33, 64, 100, 128, 200, 300, 400, 1500)

CHATS = (
    "What is the capital of France?",
    "Write a haiku about rivers.",
    "Explain why the sky is blue to a child of five, in three sentences.",
    "List five animals that live in the sea.",
    "Translate 'good morning, my friend' into Spanish and Italian.",
    "What is 17 times 23? Show the steps.",
    "Give me a recipe for pancakes with the ingredients first.",
    "Who wrote Hamlet, and when was it first performed?",
    "Summarise the plot of Romeo and Juliet in two sentences.",
    "Name three causes of the first world war and explain each briefly.",
)


@dataclass(frozen=True, slots=True)
class Reference:
    name: str
    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    gaps: tuple[float, ...]
    """Between the two highest logits, per answer token."""


def recorded() -> list[Reference]:
    """What `references` found for the default model; the slow suite finds it again."""
    return [
        Reference(each["name"], tuple(each["prompt"]), tuple(each["answer"]), tuple(each["gaps"]))
        for each in json.loads(RECORDED.read_text())
    ]


def references(model_dir: Path) -> list[Reference]:
    """Seventeen prompts: exact lengths around block borders, a long one, and real chats."""
    torch.set_num_threads(1)  # two that share a core with other tests wait for each other ten times as long
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    model.eval()
    prompts = {f"length {length}": _words(tokenizer, length) for length in LENGTHS}
    for number, chat in enumerate(CHATS[:5]):
        message = [{"role": "user", "content": chat}]
        encoded = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=True)
        prompts[f"chat {number}"] = list(encoded["input_ids"])
    return [continued(model, name, prompt) for name, prompt in prompts.items()]


def _words(tokenizer: object, length: int) -> list[int]:
    """Ordinary words, `length` tokens of them; prompts of different lengths share no first block."""
    draw = random.Random(length)
    text = " ".join(" ".join(draw.sample(CHATS, len(CHATS))) for _ in range(1 + length // 80))
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])[:length]  # type: ignore[operator]


def continued(model: object, name: str, prompt: list[int], new_tokens: int = NEW_TOKENS) -> Reference:
    """Returns a prompt with its greedy continuation."""
    with torch.inference_mode():
        out = model.generate(  # type: ignore[attr-defined]
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=new_tokens,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
            pad_token_id=0,
        )
    answer = out.sequences[0, len(prompt) :].tolist()
    tops = [logits[0].topk(2).values for logits in out.logits]
    return Reference(name, tuple(prompt), tuple(answer), tuple(float(top[0] - top[1]) for top in tops))


def mismatches(expected: list[Reference], answers: dict[str, list[int]]) -> list[str]:
    """Answers that differ although the reference was sure; near ties are printed only."""
    wrong: list[str] = []
    for reference in expected:
        answer = answers[reference.name]
        if answer == list(reference.answer):
            continue
        pairs = zip(answer, reference.answer, strict=False)
        first = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(answer), len(reference.answer)))
        gap = reference.gaps[first] if first < len(reference.gaps) else 1.0
        line = f"{reference.name}: token {first} differs, the reference's gap is {gap:.2e}: {answer} {reference.answer}"
        if gap < NEAR_TIE:
            print("near tie:", line)
        else:
            wrong.append(line)
    return wrong


if __name__ == "__main__":
    found = [json.dumps(asdict(each)) for each in references(Path(sys.argv[1]))]
    RECORDED.write_text("[\n" + ",\n".join(found) + "\n]\n")
