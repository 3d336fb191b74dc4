"""Collects, bounds and judges the responses of the two legs. Each receiver reports to its pair and
must not know about the other leg."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
import orjson

from sglang_sbs.router import errors
from sglang_sbs.router.engines.connection import FailureKind, UpstreamError
from sglang_sbs.router.engines.response_framing import MalformedResponse
from sglang_sbs.router.relay import engine_json
from sglang_sbs.router.relay.answer_kinds import ABORT_MARK_BYTES
from sglang_sbs.router.relay.engine_json import SHORT_BYTES, Parts
from sglang_sbs.router.requests.raw_json import JsonError

if TYPE_CHECKING:
    from sglang_sbs.router.relay.pair import Pair

logger = logging.getLogger(__name__)

_END_BYTES = 1024
_SMALL_BYTES = 1 << 20
"""Responses up to this size are parsed and copied at once."""
_CONTENT_TYPE = re.compile(r"[!-~][ -~]{0,255}")
"""Content types that are passed on; other text could end the head of the client's response."""
_EVENT_STREAM = re.compile(r"text/event-stream *(;|$)", re.IGNORECASE)
MAX_ANSWER_BYTES = 256 << 20
"""Limit on a response that is not streamed; logprobs are most of a large one."""
MAX_LOGPROBS_BYTES = 32 << 20
"""Limit on prefill's response if its logprobs go into decode's: half a million tokens."""
MAX_STREAMED_LOGPROBS_BYTES = 4 << 20
"""Limit on prefill's response if its logprobs go into a stream, whose events may repeat them."""

Body = bytes | bytearray
"""Body of a response, not modified once complete, so that large ones need no copy."""


class PrefillReply(msgspec.Struct, frozen=True):
    body: dict[str, Any]
    prompt_tokens: int | None
    cached_tokens: int | None
    size_bytes: int = 0


@dataclass(slots=True, eq=False, repr=False)
class _Leg:
    """Collects a response; subclasses decide what it means."""

    name: ClassVar[errors.Leg]
    pair: Pair
    status: int = 0
    body: bytearray = field(default_factory=bytearray)
    _size: int = 0
    _aborted: bool = False
    """``body`` contains an abort's mark, which only parsing can confirm."""

    @property
    def worker(self) -> str:
        return self.pair.prefill if self.name == "prefill" else self.pair.decode

    def head_received(self, status: int, headers: Mapping[str, str]) -> None:
        self.status = status

    def body_received(self, data: bytes) -> None:
        self._size += len(data)
        if self._size > MAX_ANSWER_BYTES:
            raise MalformedResponse(f"its answer is over {MAX_ANSWER_BYTES >> 20} MiB")
        if self.status == 200 or len(self.body) <= errors.MAX_ERROR_BYTES:
            self.body += data

    def failed(self, error: UpstreamError) -> None:
        if error.kind == "local":
            self.pair.leg_failed(errors.own_failure(self.name, self.worker, str(error)))
        else:
            self._broke(str(error), error.kind)

    def _broke(self, why: str, kind: FailureKind = "protocol") -> None:
        how = {"unreachable": kind == "refused", "broke_off": kind == "reset"}
        self.pair.leg_failed(errors.transport_failure(self.name, self.worker, why, **how))

    def _status_failed(self) -> None:
        status_failure = self.pair.answers.status_failure
        failure = status_failure(self.name, self.worker, self.status, bytes(self.body))
        self.pair.leg_failed(failure)


class PrefillLeg(_Leg):
    __slots__ = ()
    name = "prefill"

    def body_received(self, data: bytes) -> None:
        before, needed = self._size, self.pair.needs_prefill_reply
        if needed:
            most_bytes = MAX_STREAMED_LOGPROBS_BYTES if self.pair.stream else MAX_LOGPROBS_BYTES
            if before + len(data) > most_bytes:
                why = f"the logprobs of the prompt are over {most_bytes >> 20} MiB; ask for fewer"
                self.pair.leg_failed(errors.answer_too_large(self.name, self.worker, why))
                return
        super().body_received(data)
        if self.status != 200:
            return
        if before <= SHORT_BYTES < self._size:
            self.pair.prefill_came()
        if self._size > _SMALL_BYTES and not needed:
            self.body.clear()  # only its arrival matters

    def message_complete(self) -> None:
        if self.pair.must_park:
            self._ended_parked()
        if self.pair.closed:
            return
        if self.status != 200:
            self._status_failed()
        elif self._size > _SMALL_BYTES and not self.pair.needs_prefill_reply:
            self.pair.prefill_finished(PrefillReply({}, None, None))
        elif len(self.body) <= SHORT_BYTES:
            self._open(engine_json.opened_in_parts(self.body))
        else:
            self._open_soon(engine_json.opened_in_parts(self.body))

    def _ended_parked(self) -> None:
        """End a parked prefill request, whose response only shows whether all KV was sent."""
        if self.status != 200:
            self._status_failed()
        elif self.pair.answers.may_be_aborted(self.body, 0, self.name):
            self.pair.leg_failed(errors.leg_aborted(self.name, self.worker, 500, ""))
        else:
            self.pair.prefill_finished(PrefillReply({}, None, None))

    def _open_soon(self, parts: Parts) -> None:
        wait_s = self.pair.pace.wait_s(len(self.body))
        asyncio.get_running_loop().call_later(wait_s, self._open, parts)

    def _open(self, parts: Parts) -> None:
        """Run the next step of parsing prefill's response. Schedule the step after it, or report
        the result or failure to the pair."""
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
            self._broke("the reply is not a JSON object")
        except Exception as error:
            logger.exception("a response of %s is unusable", self.worker)
            self._broke(f"unusable response: {error}")

    def _opened(self, body: dict[str, Any]) -> None:
        answers = self.pair.answers
        abort = answers.abort_of(body, self.name)
        if abort is not None:
            self.pair.leg_failed(errors.leg_aborted(self.name, self.worker, *abort))
            return
        counts = answers.token_counts(body, asks_cached=self.pair.asks_cached)
        self.pair.prefill_finished(PrefillReply(body, *counts, len(self.body)))


class DecodeLeg(_Leg):
    __slots__ = ()
    name = "decode"

    def head_received(self, status: int, headers: Mapping[str, str]) -> None:
        self.status = self.pair.status = status
        if self.pair.must_park:
            return
        content_type = headers.get("content-type") or "application/json"
        if _CONTENT_TYPE.fullmatch(content_type) is None:
            raise MalformedResponse(f"it sent an invalid Content-Type: {content_type[:40]!r}")
        if status == 200 and self.pair.stream and not _EVENT_STREAM.match(content_type):
            raise MalformedResponse(f"its response is not an event stream: {content_type[:40]!r}")
        self.pair.content_type = content_type

    def body_received(self, data: bytes) -> None:
        if self.pair.must_park:
            self.pair.parked_data(data)
            return
        if self.status == 200 and self.pair.stream:
            self.pair.decode_data(data)
            return
        self.pair.decode_spoke = True
        new = max(0, len(self.body) - ABORT_MARK_BYTES)
        super().body_received(data)
        # Search as it arrives; searching a large response at its end would take too long.
        may_be = self.pair.answers.may_be_aborted
        self._aborted = self._aborted or may_be(self.body, new, self.name)

    def message_complete(self) -> None:
        if self.pair.must_park:
            self.pair.on_decode_ended()
            return
        if self.status != 200:
            self._status_failed()
            return
        small = len(self.body) <= _SMALL_BYTES
        if not self.pair.stream:
            abort = None
            if self._aborted:
                abort = self._read_abort() if small else (500, "")
            if abort is not None:
                self.pair.leg_failed(errors.leg_aborted(self.name, self.worker, *abort))
                return
            # Check its first and last byte, all that is possible without parsing.
            if self.body[:1] != b"{" or self.body[-_END_BYTES:].rstrip()[-1:] != b"}":
                self._broke("the reply is not a JSON object")
                return
        self.pair.decode_finished(bytes(self.body) if small else self.body)

    def _read_abort(self) -> tuple[int, str] | None:
        try:
            return self.pair.answers.abort_of(orjson.loads(self.body), self.name)
        except orjson.JSONDecodeError:
            return None
