"""A whole answer to a client, whoever serves it."""

from __future__ import annotations

from dataclasses import dataclass, field

from aiohttp import web


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    body: bytes | bytearray
    content_type: str
    headers: dict[str, str] = field(default_factory=dict)

    def response(self) -> web.Response:
        return web.Response(
            status=self.status,
            body=self.body,
            headers={"Content-Type": self.content_type, **self.headers},
        )
