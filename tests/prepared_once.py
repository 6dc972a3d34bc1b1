"""Random chats that are prepared once and anew: `python -m tests.prepared_once CASES FOLDER...` compares them.

Each folder holds the tokenizer.json of a model. A case is a text or a chat that begins like an earlier one. Its tokens
are made with what is known of the earlier ones, and once more by the tokenizer alone. It ends with the first
difference, and prints the number of cases and of segments that were found again.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from array import array
from collections.abc import Sequence
from pathlib import Path

from router.text import known_text, segments
from router.text.known_text import KnownText
from router.text.prompts import ChatPrompt
from router.text.tokenizer import TokenizerText

WORDS = (
    "the",
    " of",
    " and",
    "Ship",
    "naïve",
    "你好",
    "世界",
    "😀",
    "👩‍👩‍👧",
    "e\u0301",
    "\u0130",
    "ﬁ",
    "x1",
    "42",
    "'s",
    "…",
)
SPACES = (" ", "  ", "\n", "\n\n", "\t", "\u00a0", "\u3000", "\r\n", " \n ", "")
ODD = ("<", "<|", "|>", "</s", "▁", "\u2581a", "\0", "\ufeff", "\u200b", "[", "]", "##", "Ġ")
MOST_KNOWN = 4000
TURN_END = ("<|im_end|>", "</s>", "<|eot_id|>", "<end_of_turn>", "<|end|>", "<｜end▁of▁sentence｜>", "[SEP]")


class DictSegments:
    """Knows what was kept, for ever."""

    def __init__(self) -> None:
        self.kept: dict[bytes, array[int]] = {}
        self.found = 0

    def find(self, keys: Sequence[bytes]) -> Sequence[array[int]]:
        known = []
        for key in keys:
            if key not in self.kept:
                break
            known.append(self.kept[key])
        self.found += len(known)
        return known

    def keep(self, key: bytes, tokens: array[int]) -> None:
        self.kept[key] = tokens


class Cases:
    """Draws texts and chats that begin like earlier ones."""

    def __init__(self, added: Sequence[str], seed: int) -> None:
        self._draw = random.Random(seed)
        self._added = added
        self._texts = [""]
        self._chats: list[tuple[dict[str, str], ...]] = [()]

    def text(self) -> str:
        """Returns an earlier text, or the beginning of one, with more behind it."""
        before = self._draw.choice(self._texts)
        kept = before if self._draw.random() < 0.7 else before[: self._draw.randrange(len(before) + 1)]
        made = (kept if len(kept) < 300 else "") + self._some(12)
        self._texts.append(made)
        del self._texts[:-100]
        return made

    def chat(self) -> ChatPrompt:
        before = self._draw.choice(self._chats)
        kept = before[: self._draw.randrange(len(before) + 1)] if self._draw.random() < 0.2 else before
        role = "assistant" if kept and kept[-1]["role"] == "user" else "user"
        made = (*(kept if len(kept) < 8 else ()), {"role": role, "content": self._some(6)})
        self._chats.append(made)
        del self._chats[:-100]
        return ChatPrompt(messages=made, add_generation_prompt=role == "user")

    def chance(self, of: float) -> bool:
        return self._draw.random() < of

    def _some(self, most: int) -> str:
        return "".join(self._one() for _ in range(self._draw.randrange(most)))

    def _one(self) -> str:
        kind = self._draw.random()
        if kind < 0.2 and self._added:
            return self._draw.choice(self._added)
        if kind < 0.25 and self._added:
            token = self._draw.choice(self._added)
            return token[: self._draw.randrange(1, len(token) + 1)]
        return self._draw.choice(WORDS if kind < 0.6 else SPACES if kind < 0.9 else ODD)


def compare(text: TokenizerText, added: Sequence[str], cases: int, seed: int) -> int:
    """Returns how many segments were found again. Raises AssertionError at the first difference."""
    drawn, known = Cases(added, seed), DictSegments()
    found = 0
    for _ in range(cases):
        once = KnownText(b"owner", known)
        if drawn.chance(0.5):
            chat = drawn.chat()
            assert text.encode_chat(chat, known=once) == text.encode_chat(chat), chat
        else:
            said, adds, splits = drawn.text(), drawn.chance(0.5), drawn.chance(0.1)
            made = text.encode(said, add_special_tokens=adds, split_special_tokens=splits, known=once)
            assert made == text.encode(said, add_special_tokens=adds, split_special_tokens=splits), repr(said)
        if len(known.kept) > MOST_KNOWN:
            found += known.found
            known = DictSegments()
    return found + known.found


def opened(folder: Path) -> tuple[TokenizerText, list[str]]:
    """Returns the tokenizer of a folder, with a plain template where it has none, and texts of its added tokens."""
    with tempfile.TemporaryDirectory() as made:
        (Path(made) / "tokenizer.json").symlink_to((folder / "tokenizer.json").resolve())
        own = folder / "tokenizer_config.json"
        config = json.loads(own.read_text()) if own.is_file() else {}
        tokens = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
        contents = [each["content"] for each in tokens]
        end = next((each for each in TURN_END if each in contents), contents[0] if contents else "")
        if not isinstance(config.get("chat_template"), str) or "raise_exception" in config["chat_template"]:
            said = "{% for m in messages %}" + f"{end}{{{{ m.role }}}}\n{{{{ m.content }}}}{end}\n" + "{% endfor %}"
            config = {"chat_template": said}
        (Path(made) / "tokenizer_config.json").write_text(json.dumps(config))
        short = [each for each in contents if "reserved" not in each and "unused" not in each]
        return TokenizerText(Path(made)), short[:40]


def cut_everywhere() -> None:
    """Lets segments begin at every place where they may."""
    segments.LEAST_CHARS = 1
    known_text.LEAST_KNOWN_CHARS = 0


def main() -> None:
    cut_everywhere()
    for folder in map(Path, sys.argv[2:]):
        text, added = opened(folder)
        found = compare(text, added, int(sys.argv[1]), seed=1)
        print(f"{folder}: {sys.argv[1]} cases are equal, {found} segments were found again", flush=True)


if __name__ == "__main__":
    main()
