"""Traces and metrics of a run for OpenTelemetry collectors, by OTLP over HTTP.

A step is a span; the driver's phases, busy replicas and reward workers are spans within it, each with its `lane`. The
standard environment variables set the rest: OTEL_EXPORTER_OTLP_HEADERS, OTEL_RESOURCE_ATTRIBUTES and others.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from hone import __version__
from hone.config import Choice
from hone.tracking.activity import Activities
from hone.tracking.base import FINISHED, RunInfo, Tracker, flat_config, plain_name, printable
from hone.tracking.catalogue import describe_metric
from hone.tracking.settings import OpenTelemetrySettings

try:
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.trace import set_span_in_context
except ImportError as error:
    raise ImportError(
        "tracker opentelemetry needs the packages opentelemetry-sdk and opentelemetry-exporter-otlp-proto-http: "
        f"pip install opentelemetry-sdk opentelemetry-exporter-otlp-proto-http ({error})"
    ) from error

_NAME_LENGTH = 240
_RARELY_MS = 24 * 3600 * 1000  # metrics are sent after each step, not on a clock


class OpenTelemetryTracker(Tracker):
    """Sends the spans and the metrics of each step when it is logged."""

    def __init__(self, settings: Choice, run: RunInfo) -> None:
        chosen = settings if isinstance(settings, OpenTelemetrySettings) else OpenTelemetrySettings()
        base = chosen.endpoint.rstrip("/") if chosen.endpoint else None
        metrics_at, traces_at = (f"{base}/v1/{signal}" if base else None for signal in ("metrics", "traces"))
        resource = Resource.create({"service.name": "hone", "hone.run": run.name, "hone.version": __version__})
        timeout_ms = int(chosen.timeout_s * 1000)
        reader = PeriodicExportingMetricReader(
            OTLPMetricExporter(endpoint=metrics_at, timeout=chosen.timeout_s), _RARELY_MS, timeout_ms
        )
        self._meters = MeterProvider([reader], resource)
        self._traces = TracerProvider(resource=resource)
        self._traces.add_span_processor(
            BatchSpanProcessor(
                OTLPSpanExporter(endpoint=traces_at, timeout=chosen.timeout_s), max_export_batch_size=512
            )
        )
        self._tracer = self._traces.get_tracer("hone", __version__)
        self._meter = self._meters.get_meter("hone", __version__)
        self._gauges: dict[str, Any] = {}
        self._settings = flat_config(run.config)
        self._timeout_ms = timeout_ms
        self._activities = Activities()
        self._step_began = time.time()
        self.where = base or "OTEL_EXPORTER_OTLP_ENDPOINT"

    def log(self, step: int, values: Mapping[str, float]) -> None:
        now = time.time()
        span = self._tracer.start_span("step", start_time=_ns(self._step_began), attributes={"hone.step": step})
        inside = set_span_in_context(span)
        for lane, doing, start, end in self._activities.take(until_now=True):
            if doing:
                part = self._tracer.start_span(doing, inside, start_time=_ns(start), attributes={"hone.lane": lane})
                part.end(_ns(end))
        span.end(_ns(now))
        self._step_began = now
        for name, value in values.items():
            plain = gauge_of(name)
            if plain not in self._gauges:
                known = describe_metric(name)
                self._gauges[plain] = self._meter.create_gauge(plain, description=known.meaning if known else "")
            self._gauges[plain].set(value, {"hone.metric": printable(name)})
        self._traces.force_flush(self._timeout_ms)
        self._meters.force_flush(self._timeout_ms)

    def close(self, outcome: str = FINISHED) -> None:
        self._activities.close()
        span = self._tracer.start_span("run", attributes={"hone.outcome": outcome, **_attributes(self._settings)})
        span.end()
        self._traces.shutdown()
        self._meters.shutdown(self._timeout_ms)


def gauge_of(name: str) -> str:
    """The gauge of a metric, in the letters and the length that OpenTelemetry allows. Several metrics may share one.

    >>> gauge_of("eval/held out/mean@4")
    'hone.eval.held_out.mean_4'
    """
    return "hone." + plain_name(name).replace("/", ".").replace(" ", "_")[:_NAME_LENGTH]


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)


def _attributes(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as attributes of a span, which cannot be None."""
    return {f"hone.config.{key}": value for key, value in settings.items() if value is not None}
