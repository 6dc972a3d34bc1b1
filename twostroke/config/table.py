"""`python -m twostroke.config.table`: the page of the documentation that lists every setting."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby

from twostroke.config.cluster import ClusterConfig
from twostroke.config.leaves import Leaf, leaves_of
from twostroke.config.router import RouterCommand

HEAD = """# Settings

`make settings` writes this page from the declarations in `twostroke/config/`; a test compares the two. Each setting is
a flag of `twostroke serve`, and a key of the file of `twostroke up -f`. Flags of `twostroke router` have the same
meaning, defaults and bounds. A value that cannot be is refused at start, in one line that names the flag, or the file,
its line and the key.
"""
ROUTER = "twostroke router only"


def page() -> str:
    known = {leaf.flag for leaf in leaves_of(ClusterConfig)}
    alone = [leaf for leaf in leaves_of(RouterCommand) if leaf.flag not in known]
    parts = [HEAD]
    for title, leaves in groupby(leaves_of(ClusterConfig), key=lambda leaf: leaf.title):
        parts.append("\n".join([f"## {title}", "", *_rows(leaves, has_keys=True)]) + "\n")
    parts.append("\n".join([f"## {ROUTER}", "", *_rows(alone, has_keys=False)]) + "\n")
    return "\n".join(parts)


def _rows(leaves: Iterable[Leaf], *, has_keys: bool) -> Iterator[str]:
    key_head, key_line = ("| key in the file ", "|---") if has_keys else ("", "")
    yield f"| flag {key_head}| default | must be | meaning |"
    yield f"|---{key_line}|---|---|---|"
    for leaf in leaves:
        unit = f" {leaf.unit}" if leaf.unit is not None else ""
        key = f"| `{leaf.key}` " if has_keys else ""
        cells = (_cell(leaf.default_text), _cell(leaf.setting.bounds), _meaning(leaf))
        yield f"| `{leaf.flag}{unit}` {key}| {' | '.join(cells)} |"


def _meaning(leaf: Leaf) -> str:
    return _cell(f"{leaf.setting.help}; 0: {leaf.setting.zero}" if leaf.setting.zero else leaf.setting.help)


def _cell(text: str | None) -> str:
    return (text or "").replace("|", "\\|")


if __name__ == "__main__":
    print(page(), end="")
