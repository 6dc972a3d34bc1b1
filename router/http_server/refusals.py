"""Answers to what cannot become a request."""

from __future__ import annotations

from dataclasses import dataclass

import httptools

MOST_HEADER_BYTES = 64 << 10
"""Bytes of the head of one request. A token to resume after may have 16 KiB."""
MOST_HEADERS = 256
"""Header lines of one request."""


@dataclass(frozen=True, slots=True)
class HttpRefusal:
    """The answer to what cannot become a request."""

    status: int
    message: str

    @property
    def rest(self) -> bytes:
        """All of the response but its status line."""
        body = (
            b'{"error":{"message":"%s","type":"invalid_request_error","param":null,"code":null}}'
            % self.message.encode()
        )
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
        return head + body


NOT_HTTP = HttpRefusal(400, "this is not a valid HTTP request")
TOO_MUCH_FRAMING = HttpRefusal(400, "the chunks of the body are too small, or have too much beside their content")
TOO_MANY_HEADERS = HttpRefusal(431, f"the headers are more than {MOST_HEADERS} lines or {MOST_HEADER_BYTES} bytes")
OTHER_VERSION = HttpRefusal(505, "only HTTP/1.0 and HTTP/1.1 are spoken here")


class HttpRefused(Exception):
    def __init__(self, refusal: HttpRefusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


def refusal_of(error: httptools.HttpParserError) -> HttpRefusal:
    return error.__context__.refusal if isinstance(error.__context__, HttpRefused) else NOT_HTTP
