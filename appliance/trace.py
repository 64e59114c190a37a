"""Traces, with OpenTelemetry: a span for each call and for each request to the target that a call makes.

Without ``[trace] otlp_endpoint`` there is no `Tracer` and nothing of OpenTelemetry is imported here. A caller that
sends ``traceparent`` (gRPC metadata, HTTP header) finds the node's spans in its own trace.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from forebay import __version__, request_id
from forebay.errors import ConfigInvalid, ForebayError, reason

if TYPE_CHECKING:
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider

__all__ = ["Span", "Tracer"]

_EXPORT_S = 2


class Span:
    """The span of a call."""

    def __init__(self, span: trace.Span) -> None:
        self._span = span

    def end(self, code: int, principal: str) -> None:
        """The call is over, with that outcome: an error code, 0, or less if its caller went away."""
        from opentelemetry.trace import Status, StatusCode

        self._span.set_attribute("forebay.code", code)
        if principal:
            self._span.set_attribute("forebay.principal", principal)
        if code > 0:
            self._span.set_status(Status(StatusCode.ERROR, reason(code)))
        self._span.end()


class Tracer:
    """Makes spans. With a provider of its own, so that what else runs in the process is not traced."""

    def __init__(self, provider: TracerProvider) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer("forebay", __version__)
        self._parent = TraceContextTextMapPropagator()

    @classmethod
    def to_collector(cls, endpoint: str, node: str) -> Tracer:
        """Spans go to a collector, in batches. Raises `ConfigInvalid` if OpenTelemetry is not installed."""
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as e:
            raise ConfigInvalid(
                f"trace.otlp_endpoint is set, but OpenTelemetry is not installed ({e}): "
                "pip install -e '.[otel]' in a clone, with the node's own pip",
                field="trace.otlp_endpoint",
            ) from e
        about = {"service.name": "forebay", "service.instance.id": node, "service.version": __version__}
        provider = TracerProvider(resource=Resource.create(about))
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint, timeout=_EXPORT_S)))
        return cls(provider)

    def call(self, name: str, headers: Mapping[str, Any]) -> Span:
        """A span for a call that came in, current for the rest of the task, which is the call's own."""
        from opentelemetry import context
        from opentelemetry.trace import SpanKind, set_span_in_context

        carrier = {key: headers[key] for key in ("traceparent", "tracestate") if isinstance(headers.get(key), str)}
        parent = self._parent.extract(carrier, context.Context())
        about = {"forebay.request_id": request_id.current()}
        span = self._tracer.start_span(name, parent, SpanKind.SERVER, about)
        context.attach(set_span_in_context(span, parent))
        return Span(span)

    @contextmanager
    def request(self, method: str) -> Iterator[None]:
        """A span around one request to the target, within a call; what the node does of itself has none."""
        from opentelemetry.trace import SpanKind, Status, StatusCode, get_current_span

        if not get_current_span().get_span_context().is_valid:
            yield
            return
        about = {"forebay.request_id": request_id.current(), "rpc.method": method}
        with self._tracer.start_as_current_span(
            f"target {method}", None, SpanKind.CLIENT, about, record_exception=False, set_status_on_exception=False
        ) as span:
            try:
                yield
            except ForebayError as error:
                span.set_attribute("forebay.code", error.code)
                span.set_status(Status(StatusCode.ERROR, error.message))
                raise

    def close(self) -> None:
        """Send what waits; a collector that is not there is given up after a few seconds."""
        self._provider.shutdown()
