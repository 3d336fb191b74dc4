"""OpenTelemetry spans of a request: hold, dispatch, prefill, first byte, end (``--enable-trace``).

Without the packages of the extra ``trace``, :func:`open_traces` returns ``None``. Spans are created
when an attempt is over, so that they do not delay the request."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import SpanProcessor
    from opentelemetry.trace import Span

    from sglang_sbs.scheduling.events import Dispatch, Outcome

logger = logging.getLogger(__name__)

INSTALL = "pip install 'sglang-sbs[trace]'"
_PROPAGATED = ("traceparent", "tracestate")


@dataclass(slots=True)
class AttemptTrace:
    """Times of one attempt's stages, in nanoseconds since the epoch; 0: not reached."""

    parent: Context
    """OpenTelemetry context of the client request's span, the parent of the attempt's spans."""
    submitted_ns: int = field(default_factory=time.time_ns)
    dispatched_ns: int = 0
    sent_ns: int = 0
    prefill_ns: int = 0
    first_byte_ns: int = 0


class Traces:
    def __init__(self, processor: SpanProcessor) -> None:
        """Create a tracer whose spans go to ``processor``. Raises: ImportError, the packages of the
        extra ``trace`` are not installed."""
        from opentelemetry import context, trace
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._context = context
        self._trace = trace
        self._propagator = TraceContextTextMapPropagator()
        self._provider = TracerProvider(resource=Resource.create({"service.name": "sglang-sbs"}))
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("sglang_sbs.router")

    @contextmanager
    def request(
        self, path: str, headers: Sequence[tuple[str, str]], request_id: str
    ) -> Iterator[tuple[Span, list[tuple[str, str]]]]:
        """Open the span of a client request, a child of the client's own, and yield it with the
        headers to forward: engines' spans become its children."""
        carrier = {name.lower(): value for name, value in headers}
        with self._tracer.start_as_current_span(
            f"POST {path}",
            context=self._propagator.extract(carrier),
            kind=self._trace.SpanKind.SERVER,
            attributes={"http.route": path, "request_id": request_id},
        ) as span:
            passed: dict[str, str] = {}
            self._propagator.inject(passed)
            own = [item for item in headers if item[0].lower() not in _PROPAGATED]
            yield span, [*own, *passed.items()]

    def on_submitted(self) -> AttemptTrace:
        """Return a record for an attempt submitted now; its spans become children of the current
        one, the request's."""
        return AttemptTrace(self._context.get_current())

    def on_ended(self, attempt: AttemptTrace, command: Dispatch | None, outcome: Outcome) -> None:
        """Create the spans of an ended attempt; ``command`` is its dispatch, if any."""
        end_ns = time.time_ns()
        ok = outcome == "completed"
        held = attempt.dispatched_ns or end_ns
        attributes: dict[str, str | int | float] = {"outcome": outcome}
        if command is not None:
            attributes |= {
                "sbs.reason": command.reason,
                "sbs.batch": command.batch,
                "sbs.prefill": command.prefill,
                "sbs.prefill_rank": command.prefill_rank,
                "sbs.decode": command.decode,
                "sbs.decode_rank": command.decode_rank,
            }
        root = self._tracer.start_span(
            "attempt", attempt.parent, attributes=attributes, start_time=attempt.submitted_ns
        )
        inside = self._trace.set_span_in_context(root, attempt.parent)

        def child(name: str, start_ns: int, stop_ns: int, *, done: bool) -> None:
            if not start_ns:
                return
            span = self._tracer.start_span(name, inside, start_time=start_ns)
            if not done:
                span.set_status(self._trace.StatusCode.ERROR, outcome)
            span.end(stop_ns)

        first, prefilled = attempt.first_byte_ns, attempt.prefill_ns
        child("hold", attempt.submitted_ns, held, done=bool(attempt.dispatched_ns))
        child("dispatch", attempt.dispatched_ns, attempt.sent_ns or end_ns, done=True)
        child("prefill", attempt.sent_ns, prefilled or end_ns, done=bool(prefilled) or ok)
        child("first byte", attempt.sent_ns, first or end_ns, done=bool(first))
        child("end", first, end_ns, done=ok)
        if not ok:
            root.set_status(self._trace.StatusCode.ERROR, outcome)
        root.end(end_ns)

    def close(self) -> None:
        """Export the remaining spans; blocks for up to 5 s."""
        self._provider.force_flush(5000)
        self._provider.shutdown()


def open_traces(endpoint: str) -> Traces | None:
    """Return traces that go to an OTLP collector (gRPC) at ``HOST:PORT``, or at a URL for TLS. Log
    a warning and return ``None`` if the packages are missing."""
    try:
        return Traces(_exporting_to(endpoint))
    except ImportError as error:
        logger.warning("--enable-trace has no effect: %s; %s", error, INSTALL)
        return None


def _exporting_to(endpoint: str) -> SpanProcessor:
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    insecure = not endpoint.startswith("https://")
    return BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint, insecure=insecure))
