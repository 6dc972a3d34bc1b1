"""The list of models as Anthropic's API writes it, page by page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from router.dialects.reply import Json
from twostroke.base.client_text import shown
from twostroke.base.errors import InvalidRequest

VERSION_HEADER = "anthropic-version"
"""Header that every client of Anthropic's API sends, and no other client does."""
DEFAULT_LIMIT, MOST_LIMIT = 20, 1000
"""Models on a page, by default and at most, as in Anthropic's API."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedModel:
    name: str
    created_s: int
    """Seconds since the Unix epoch."""
    context_tokens: int | None
    """Tokens of prompt and answer together. None: no worker has said it yet."""

    @property
    def info(self) -> Json:
        created = datetime.fromtimestamp(self.created_s, UTC).isoformat().replace("+00:00", "Z")
        return {
            "type": "model",
            "id": self.name,
            "display_name": self.name,
            "created_at": created,
            "lifecycle": "active",
            "max_input_tokens": self.context_tokens,
            "max_tokens": self.context_tokens,
        }


def model_page(models: Sequence[ListedModel], query: Mapping[str, str]) -> Json:
    """Returns the page that `limit` and `after_id` or `before_id` ask for. Raises InvalidRequest, naming a wrong one.

    The page after or before a model that is not served is empty.
    """
    limit, names = _limit(query.get("limit", "")), [model.name for model in models]
    if "after_id" in query and "before_id" in query:
        raise InvalidRequest("after_id and before_id exclude each other", field="before_id")
    before = query.get("before_id")
    if before is not None:
        rest = list(models[: names.index(before)]) if before in names else []
        page, has_more = rest[-limit:], len(rest) > limit
    else:
        after = query.get("after_id")
        begin = 0 if after is None else names.index(after) + 1 if after in names else len(names)
        page, has_more = list(models[begin : begin + limit]), len(models) - begin > limit
    first, last = (page[0].name, page[-1].name) if page else (None, None)
    return {"data": [model.info for model in page], "has_more": has_more, "first_id": first, "last_id": last}


def _limit(value: str) -> int:
    if not value:
        return DEFAULT_LIMIT
    if not (value.isascii() and value.isdecimal() and len(value) < 10 and 1 <= int(value) <= MOST_LIMIT):
        raise InvalidRequest(f"limit must be a number from 1 to {MOST_LIMIT}, got {shown(value)}", field="limit")
    return int(value)
