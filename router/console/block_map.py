"""Finds where the blocks of a prompt are: tokenizes and hashes it, and looks up how much of it each worker holds."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

from router.auth.auth import AuthContext
from router.requests.params import check_request_id, check_salt
from router.requests.request_handler import RequestHandler
from router.serving.prompt_hashes import HASHED_BLOCKS
from twostroke.base.errors import InvalidRequest
from twostroke.base.ids import BlockHash, WorkerId
from twostroke.kv_cache.block import extend_hashes, owner_salt
from twostroke.kv_cache.tier import Tier

MOST_SHOWN_BLOCKS = 512
"""Most blocks whose text is shown. The others are only counted."""
MOST_HOLDERS = 64
"""Most workers that are listed, those with the longest prefix first."""
SHOWN_HASH_DIGITS = 16

FIELDS: dict[str, type] = {
    "prompt": str,
    "messages": list,
    "tools": list,
    "tenant": str,
    "cache_salt": str,
    "model": str,
}


async def blocks_of(handler: RequestHandler, fields: dict[str, Any], auth: AuthContext) -> dict[str, Any]:
    """Returns the blocks of the prompt in `fields`, and the workers that hold them. Raises ServeError."""
    if bool(fields["prompt"]) == bool(fields["messages"]):
        raise InvalidRequest("name either a prompt or messages", field="prompt")
    check_request_id(fields["tenant"], "tenant")
    facts, named_model = handler.dispatcher.facts, handler.named(fields["model"])
    tokens, texts = await _tokenized(handler, fields, auth)
    salt = owner_salt(fields["tenant"], check_salt(fields["cache_salt"]) if fields["cache_salt"] else b"")
    public = handler.public.blocks_of(tokens, facts.block_size)
    if named_model is not None:
        salt, public = named_model.salted(salt), 0
    hashes = await _hashed(tokens, facts.block_size, salt, public)
    held = handler.dispatcher.operations.holders(hashes)
    shown = range(min(len(hashes), MOST_SHOWN_BLOCKS))
    size = facts.block_size
    return {
        "tokens": len(tokens),
        "block_size": size,
        "block_count": len(hashes),
        "public_blocks": public,
        "rest_tokens": len(tokens) - len(hashes) * size,
        "blocks": [
            {"hash": hashes[block].hex()[:SHOWN_HASH_DIGITS], "text": "".join(texts[block * size : (block + 1) * size])}
            for block in shown
        ],
        "rest_text": "".join(texts[len(hashes) * size :]) if len(hashes) <= MOST_SHOWN_BLOCKS else "",
        "holder_count": len(held),
        "holders": _holders(held),
    }


async def _hashed(tokens: Sequence[int], block_size: int, salt: bytes, public_blocks: int) -> list[BlockHash]:
    """Returns the hashes of all full blocks. It lets other requests run from time to time."""
    hashes: list[BlockHash] = []
    step = HASHED_BLOCKS * block_size
    for end in range(step, len(tokens) + step, step):
        if hashes:
            await asyncio.sleep(0)
        extend_hashes(hashes, tokens[:end], block_size, salt, public_blocks)
    return hashes


def _holders(held: dict[WorkerId, tuple[int, ...]]) -> list[dict[str, Any]]:
    """Returns, for each worker, how many leading blocks it holds in each tier and nearer ones, nearest first."""
    deepest = sorted(held.items(), key=lambda item: item[1][-1], reverse=True)[:MOST_HOLDERS]
    tiers = [tier.name.lower() for tier in Tier]
    return [{"worker": worker, "down_to": dict(zip(tiers, depths, strict=False))} for worker, depths in deepest]


async def _tokenized(
    handler: RequestHandler, fields: dict[str, Any], auth: AuthContext
) -> tuple[Sequence[int], Sequence[str]]:
    """Returns token ids and their texts."""
    prompt: dict[str, Any] = {"prompt": fields["prompt"]}
    if fields["messages"]:
        prompt = {"messages": fields["messages"], **({"tools": fields["tools"]} if fields["tools"] else {})}
    body = json.dumps({**prompt, "return_token_strs": True}).encode()
    reply = json.loads(await handler.prepare("tokenize", body, auth, client="console"))
    return reply["tokens"], reply["token_strs"]
