"""The newest metrics of a run for Prometheus, at an address that it scrapes.

    log --> the newest value of each metric -->|
    activities --> seconds by lane ----------->| a collector of `prometheus-client` <--GET /metrics-- Prometheus

`reward/mean` is the gauge `hone_reward_mean`, `eval/test/exact_match` is `hone_eval_exact_match` with the label `set`.
Each sample has the labels `run` and `metric`; the latter is hone's name, in case two names give the same gauge.
"""

from __future__ import annotations

import hmac
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from hone.config import Choice
from hone.tracking.activity import Activities
from hone.tracking.base import FINISHED, RunInfo, Tracker, TrackingError
from hone.tracking.catalogue import describe_metric
from hone.tracking.settings import LOOPBACK, PrometheusSettings

try:
    from prometheus_client import CollectorRegistry, make_wsgi_app
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
except ImportError as error:
    raise ImportError(
        f"tracker prometheus needs the package prometheus-client: pip install 'prometheus-client>=0.20' ({error})"
    ) from error

_REQUEST_S = 10.0  # for one request of a client
_EVALUATION = re.compile(r"eval/(?P<set>[^/]+)/(?:(?P<role>[^/]+)/)?(?P<figure>[^/]+)")


class PrometheusTracker(Tracker):
    """Serves /metrics while the run lasts."""

    def __init__(self, settings: Choice, run: RunInfo) -> None:
        chosen = settings if isinstance(settings, PrometheusSettings) else PrometheusSettings()
        token = Path(chosen.token_file).read_text(encoding="utf-8").strip() if chosen.token_file else ""
        if chosen.token_file and not token:
            raise TrackingError(f"tracker prometheus: token_file {chosen.token_file} is empty; write a token into it")
        if chosen.host not in (LOOPBACK, "localhost", "::1") and not token:
            raise TrackingError(
                f"tracker prometheus: host = {chosen.host!r} is reachable from other machines: set token_file to a "
                f"file with a token, which Prometheus sends as `authorization`, or leave host at {LOOPBACK}"
            )
        self._collector = _Newest(run)
        registry = CollectorRegistry()
        registry.register(self._collector)
        try:
            self._server = make_server(
                chosen.host, chosen.port, _guarded(make_wsgi_app(registry), token), _Server, _Quiet
            )
        except OSError as error:
            raise TrackingError(
                f"tracker prometheus: cannot listen at {chosen.host}:{chosen.port} ({error.strerror or error}); set "
                "its port to a free one"
            ) from error
        self.where = f"http://{chosen.host}:{self._server.server_port}/metrics"
        threading.Thread(target=self._server.serve_forever, name="prometheus", daemon=True).start()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._collector.log(step, values)

    def close(self, outcome: str = FINISHED) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._collector.close()


class _Newest:
    """The newest value of each metric of a run, and the seconds that each lane spent on each activity."""

    def __init__(self, run: RunInfo) -> None:
        self._run = run.name
        self._total = run.total_steps
        self._values: dict[str, float] = {}
        self._step = run.resumed_from or 0
        self._logged_at = time.time()  # the run's start, before its first step
        self._seconds: dict[tuple[str, str], float] = {}
        self._activities = Activities()
        self._lock = threading.Lock()  # a request has a thread of its own

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._values = {**self._values, **values}  # a request may read the old ones meanwhile
        self._step, self._logged_at = step, time.time()
        self._add_up()  # here too, or the list would grow for as long as nobody asks

    def _add_up(self) -> dict[tuple[str, str], float]:
        """Seconds by lane and activity until now."""
        with self._lock:
            for lane, doing, start, end in self._activities.take(until_now=True):
                place = lane, doing or "idle"
                self._seconds[place] = self._seconds.get(place, 0.0) + end - start
            return dict(self._seconds)

    def close(self) -> None:
        self._activities.close()

    def collect(self) -> Iterator[Metric]:
        """The samples, as prometheus-client asks for them."""
        for name, meaning, value in (
            ("hone_step", "last step that was logged", self._step),
            ("hone_step_timestamp_seconds", "when that was", self._logged_at),
            ("hone_total_steps", "last step of the run", self._total),
        ):
            if value is not None:
                gauge = GaugeMetricFamily(name, meaning, labels=["run"])
                gauge.add_metric([self._run], float(value))
                yield gauge
        families: dict[str, GaugeMetricFamily] = {}
        for metric, value in self._values.items():
            name, own = gauge_of(metric)
            if name not in families:
                known = describe_metric(metric)
                meaning = known.meaning if known else metric
                families[name] = GaugeMetricFamily(name, meaning, labels=["run", "metric", "set", "role"])
            families[name].add_metric([self._run, metric, own.get("set") or "", own.get("role") or ""], value)
        yield from families.values()
        spent = CounterMetricFamily("hone_activity_seconds", "time by lane", labels=["run", "lane", "doing"])
        for (lane, doing), seconds in sorted(self._add_up().items()):
            spent.add_metric([self._run, lane, doing], seconds)
        yield spent


def gauge_of(metric: str) -> tuple[str, Mapping[str, str | None]]:
    """The name of a metric's gauge, and the labels that an evaluation has.

    >>> gauge_of("eval/test/exact_match")
    ('hone_eval_exact_match', {'set': 'test', 'role': None, 'figure': 'exact_match'})
    """
    found = _EVALUATION.fullmatch(metric)
    own = found.groupdict() if found else {}
    name = f"eval_{own['figure']}" if own else metric
    return f"hone_{re.sub('[^a-zA-Z0-9]+', '_', name)}", own


App = Callable[[Any, Any], Iterable[bytes]]


def _guarded(app: App, token: str) -> App:
    """The application for clients that send the token as a bearer; for all, without a token."""

    def checked(environment: Any, start: Any) -> Iterable[bytes]:
        given = str(environment.get("HTTP_AUTHORIZATION", "")).removeprefix("Bearer ")
        if token and not hmac.compare_digest(given.encode(), token.encode()):
            start("401 Unauthorized", [("WWW-Authenticate", "Bearer"), ("Content-Type", "text/plain")])
            return [b"a bearer token is needed\n"]
        return app(environment, start)

    return checked


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class _Quiet(WSGIRequestHandler):
    timeout = _REQUEST_S

    def log_message(self, *arguments: Any) -> None:
        """Log nothing: Prometheus asks every few seconds."""
