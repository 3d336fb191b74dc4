"""The answers of the two legs: collected as they come, bounded, and judged.

One receiver for prefill and one for decode. Each says what its answer means to whoever sent it
(:class:`LegVerdicts`), and must not know what the other leg does.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from sglang_sbs.router.engines.connection import UpstreamError
from sglang_sbs.router.engines.response_framing import MalformedResponse
from sglang_sbs.router.errors import (
    MAX_ERROR_BYTES,
    Leg,
    LegFailure,
    answer_too_large,
    leg_aborted,
    leg_status_failure,
    own_failure,
    transport_failure,
)
from sglang_sbs.router.lanes import Pace
from sglang_sbs.router.relay.engine_json import SHORT_BYTES, Parts, opened_in_parts
from sglang_sbs.router.relay.engine_verdicts import (
    ABORT_MARK,
    ABORT_MARK_BYTES,
    abort_of,
    read_abort,
    token_counts,
)
from sglang_sbs.router.requests.raw_json import JsonError
from sglang_sbs.router.workers.placement import Placement

logger = logging.getLogger(__name__)

_END_BYTES = 1024
_SMALL_BYTES = 1 << 20
"""Answers up to this size are parsed and copied without a thought."""
_CONTENT_TYPE = re.compile(r"[!-~][ -~]{0,255}")
"""What may be passed on: anything else could end the head of the client's answer."""
MAX_ANSWER_BYTES = 256 << 20
"""Of an answer that is not streamed; most of a large one are logprobs."""
MAX_LOGPROBS_BYTES = 32 << 20
"""Of a prefill leg's answer whose logprobs go into decode's: half a million tokens."""
MAX_STREAMED_LOGPROBS_BYTES = 4 << 20
"""The same where decode's answer is streamed: each of its events may get all of them."""

Body = bytes | bytearray
"""Of an answer; never changed once it is whole, for a copy of a large one would take time."""


@dataclass(frozen=True, slots=True)
class PrefillReply:
    """What the prefill leg answered."""

    body: dict[str, Any]
    prompt_tokens: int | None
    cached_tokens: int | None
    size_bytes: int = 0
    """Of ``body``."""


@dataclass(slots=True)
class PairRequest:
    """What both legs ask. :class:`~.pair.Pair` lets go of the bodies once they are sent: thousands
    of pairs may wait for their answers."""

    rid: str
    placement: Placement
    path: str
    headers: bytes
    prefill_body: Sequence[bytes | bytearray]
    """In pieces, as :meth:`~sglang_sbs.router.engines.connection_pool.Pool.call` takes them."""
    decode_body: Sequence[bytes | bytearray]
    stream: bool
    needs_prefill_reply: bool
    """Hold decode's output until prefill has answered (its logprobs go into it)."""
    asks_cached: bool = False
    """Prefill was asked for ``cached_tokens_details``, which it leaves out where there are none."""

    @property
    def prefill(self) -> str:
        """The worker's URL."""
        return self.placement.prefill.url

    @property
    def decode(self) -> str:
        return self.placement.decode.url


class LegVerdicts(Protocol):
    """Who is told what the legs answered."""

    status: int
    content_type: str
    """Both of decode's answer."""
    pace: Pace
    request: PairRequest

    def leg_failed(self, failure: LegFailure) -> None: ...

    @property
    def closed(self) -> bool:
        """Nobody waits for the answers any more."""

    def prefill_came(self) -> None:
        """Its reply comes, and is long."""

    def prefill_finished(self, reply: PrefillReply) -> None: ...

    def decode_data(self, data: bytes) -> None:
        """A piece of its stream."""

    def decode_finished(self, body: Body) -> None:
        """``body`` is empty if it was streamed."""


class _Leg:
    """Collects a response; subclasses decide what it means."""

    __slots__ = ("_size", "body", "pair", "status")

    def __init__(self, pair: LegVerdicts) -> None:
        self.pair = pair
        self.status = 0
        self._size = 0
        self.body = bytearray()

    @property
    def name(self) -> Leg:
        raise NotImplementedError

    @property
    def worker(self) -> str:
        raise NotImplementedError

    def head_received(self, status: int, headers: Mapping[str, str]) -> None:
        self.status = status

    def most_bytes(self) -> int:
        """Of an answer; a longer one is none."""
        return MAX_ANSWER_BYTES

    def body_received(self, data: bytes) -> None:
        self._size += len(data)
        if self._size > self.most_bytes():
            raise MalformedResponse(f"its answer is over {self.most_bytes() >> 20} MiB")
        if self.status == 200 or len(self.body) <= MAX_ERROR_BYTES:
            self.body += data

    def message_complete(self) -> None:
        raise NotImplementedError

    def failed(self, error: UpstreamError) -> None:
        if error.kind == "local":
            self.pair.leg_failed(own_failure(self.name, self.worker, str(error)))
            return
        self.pair.leg_failed(
            transport_failure(
                self.name,
                self.worker,
                str(error),
                unreachable=error.kind == "refused",
                broke_off=error.kind == "reset",
            )
        )

    def _status_failed(self) -> None:
        self.pair.leg_failed(
            leg_status_failure(self.name, self.worker, self.status, bytes(self.body))
        )


class PrefillLeg(_Leg):
    __slots__ = ()

    @property
    def name(self) -> Leg:
        return "prefill"

    @property
    def worker(self) -> str:
        return self.pair.request.prefill

    @property
    def _most_logprobs_bytes(self) -> int:
        stream = self.pair.request.stream
        return MAX_STREAMED_LOGPROBS_BYTES if stream else MAX_LOGPROBS_BYTES

    @property
    def _is_needed(self) -> bool:
        return self.pair.request.needs_prefill_reply

    def body_received(self, data: bytes) -> None:
        before = self._size
        if self._is_needed and before + len(data) > self._most_logprobs_bytes:
            self._too_large()
            return
        super().body_received(data)
        if self.status != 200:
            return
        if before <= SHORT_BYTES < self._size:
            self.pair.prefill_came()
        if self._size > _SMALL_BYTES and not self._is_needed:
            self.body.clear()  # that it came is all that counts

    def _too_large(self) -> None:
        most = f"{self._most_logprobs_bytes >> 20} MiB"
        why = f"the logprobs of the prompt are over {most}; ask for fewer"
        self.pair.leg_failed(answer_too_large("prefill", self.worker, why))

    def message_complete(self) -> None:
        if self.pair.closed:
            return
        if self.status != 200:
            self._status_failed()
        elif self._size > _SMALL_BYTES and not self._is_needed:
            self.pair.prefill_finished(PrefillReply({}, None, None))
        elif len(self.body) <= SHORT_BYTES:
            self._open(opened_in_parts(self.body))
        else:
            self._open_soon(opened_in_parts(self.body))

    def _open_soon(self, parts: Parts) -> None:
        wait_s = self.pair.pace.wait_s(len(self.body))
        asyncio.get_running_loop().call_later(wait_s, self._open, parts)

    def _open(self, parts: Parts) -> None:
        """Go on with it; between two parts others get their turn."""
        if self.pair.closed:
            return
        try:
            try:
                next(parts)
            except StopIteration as over:
                self._opened(over.value)
            else:
                self._open_soon(parts)
        except JsonError:
            self._unusable("the reply is not a JSON object")
        except Exception as error:
            logger.exception("an answer of %s could not be used", self.worker)
            self._unusable(f"unusable response: {error}")

    def _unusable(self, why: str) -> None:
        self.pair.leg_failed(transport_failure("prefill", self.worker, why, unreachable=False))

    def _opened(self, body: dict[str, Any]) -> None:
        abort = abort_of(body)
        if abort is not None:
            self.pair.leg_failed(leg_aborted("prefill", self.worker, *abort))
            return
        counts = token_counts(body, self.pair.request.asks_cached)
        self.pair.prefill_finished(PrefillReply(body, *counts, len(self.body)))


class DecodeLeg(_Leg):
    __slots__ = ("_aborted",)

    def __init__(self, pair: LegVerdicts) -> None:
        super().__init__(pair)
        self._aborted = False

    @property
    def name(self) -> Leg:
        return "decode"

    @property
    def worker(self) -> str:
        return self.pair.request.decode

    def head_received(self, status: int, headers: Mapping[str, str]) -> None:
        self.status = self.pair.status = status
        content_type = headers.get("content-type") or "application/json"
        if _CONTENT_TYPE.fullmatch(content_type) is None:
            raise MalformedResponse(f"its content-type is none: {content_type[:40]!r}")
        self.pair.content_type = content_type

    def body_received(self, data: bytes) -> None:
        if self.status == 200 and self.pair.request.stream:
            self.pair.decode_data(data)
            return
        new = max(0, len(self.body) - ABORT_MARK_BYTES)
        super().body_received(data)
        # As it comes: at its end a search through all of a large answer would take long.
        self._aborted = self._aborted or ABORT_MARK.search(self.body, new) is not None

    def message_complete(self) -> None:
        if self.status != 200:
            self._status_failed()
            return
        if not self.pair.request.stream and self._aborted:
            abort = (500, "") if len(self.body) > _SMALL_BYTES else read_abort(self.body)
            if abort is not None:
                self.pair.leg_failed(leg_aborted("decode", self.worker, *abort))
                return
        if not self.pair.request.stream and not _looks_like_json(self.body):
            self.failed(UpstreamError("protocol", "the reply is not a JSON object"))
            return
        small = len(self.body) <= _SMALL_BYTES
        self.pair.decode_finished(bytes(self.body) if small else self.body)


def _looks_like_json(body: bytearray) -> bool:
    """Whether it begins and ends as an object does: all that can be told without parsing it."""
    return body[:1] == b"{" and body[-_END_BYTES:].rstrip()[-1:] == b"}"
