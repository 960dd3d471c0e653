"""Activities of a run's parts, and the trackers that show them: a timeline, Prometheus, OpenTelemetry."""

import gzip
import json
import os
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from hone.config import build
from hone.tracking.activity import Activities
from hone.tracking.base import LISTENERS, RunInfo, TrackingError, note
from hone.tracking.catalogue import describe_metric
from hone.tracking.hub import Tracking
from hone.tracking.settings import PrometheusSettings, TraceSettings, TrackingConfig
from hone.tracking.trackers.trace import TraceTracker, read_trace

WAIT_S = 30


@pytest.fixture
def activities():
    collected = Activities()
    yield collected
    collected.close()


def test_a_lane_does_one_thing_at_a_time(activities):
    before = time.time()
    note("replica-0", "generate")
    note("replica-0", "generate")  # the same goes on
    note("worker", "reward")
    note("replica-0", "")
    note("replica-0", "sync")
    found = activities.take()
    assert [(one.lane, one.doing) for one in found] == [("replica-0", "generate"), ("replica-0", "")]
    assert before <= found[0].start <= found[0].end == found[1].start <= time.time()
    rest = activities.take(until_now=True)
    assert {(one.lane, one.doing) for one in rest} == {("replica-0", "sync"), ("worker", "reward")}
    note("worker", "")
    (end,) = activities.take()
    assert end.start >= rest[0].end, "a part that was taken is not given again"


def test_nobody_listens_after_the_end():
    closed = Activities()
    closed.close()
    note("driver", "generate")
    note("driver", "")
    assert closed.take() == []


def config(*trackers):
    return build(TrackingConfig, {"trackers": ["jsonl", *trackers]}, source="test")


def test_a_timeline_has_phases_replicas_and_steps_and_goes_on_when_a_run_is_continued(tmp_path):
    for begin, steps in ((0, (1, 2)), (2, (3,))):
        with Tracking(config("trace"), RunInfo(tmp_path)) as hub:
            hub.begin(begin)
            for step in steps:
                hub.phase("generate")
                note("vllm-0", "generate")
                hub.phase("backward")
                note("vllm-0", "")
                hub.phase("")
                hub.log(step, {"reward/mean": 0.5})
    events = read_trace(tmp_path / "trace.json")
    lanes = {one["tid"]: one["args"]["name"] for one in events if one["name"] == "thread_name"}
    spans = [(lanes[one["tid"]], one["name"]) for one in events if one["ph"] == "X"]
    assert [name for lane, name in spans if lane == "steps"] == ["step 1", "step 2", "step 3"]
    assert [name for lane, name in spans if lane == "driver"][:2] == ["generate", "backward"]
    assert {"generate", "idle"} == {name for lane, name in spans if lane == "vllm-0"}
    # an array without its end is what Perfetto reads; with its end it is JSON
    text = (tmp_path / "trace.json").read_text()
    assert len(json.loads(text.rstrip().rstrip(",") + "]")) == len(events)
    for one in events:  # what the trace event format asks of complete events and of metadata
        assert {"name": str, "ph": str, "pid": int, "tid": int}.items() <= {k: type(v) for k, v in one.items()}.items()
        assert one["ph"] in ("X", "M")
        assert one["ph"] == "M" or (type(one["ts"]) is type(one["dur"]) is int and one["ts"] > 0 <= one["dur"])
        assert one["ph"] == "X" or one["name"] in ("process_name", "thread_name", "thread_sort_index")


def test_no_two_spans_of_a_lane_overlap(tmp_path):
    """Perfetto and speedscope take the second of two spans that overlap by a microsecond for a part of the first."""
    tracker = TraceTracker(TraceSettings(), RunInfo(tmp_path))
    for step in range(100):
        note("vllm-0", ("generate", "sync")[step % 2])
        tracker.log(step, {})
    tracker.close()
    spans = [one for one in read_trace(tmp_path / "trace.json") if one["ph"] == "X"]
    for lane in {one["tid"] for one in spans}:
        own = [one for one in spans if one["tid"] == lane]
        ends = [one["ts"] + one["dur"] for one in own]
        assert len(own) > 90
        assert all(end <= after["ts"] for end, after in zip(ends, own[1:], strict=False))


def test_a_timeline_ends_at_its_limit(tmp_path):
    tracker = TraceTracker(TraceSettings(max_mib=1), RunInfo(tmp_path))
    with pytest.raises(TrackingError, match=r"trace\.json has reached its limit, max_mib of the tracker trace"):
        all(tracker.log(step, {}) is None for step in range(20_000))
    assert LISTENERS == [], "nobody takes activities any more, so nobody collects them"
    tracker.close()
    assert (tmp_path / "trace.json").stat().st_size <= 2**20


def test_a_timeline_goes_on_after_a_killed_launch_in_the_same_lanes(tmp_path):
    path = tmp_path / "trace.json"
    first = TraceTracker(TraceSettings(), RunInfo(tmp_path))
    note("vllm-0", "generate")
    first.log(1, {})
    first.close()
    with path.open("a") as file:
        file.write('{"name": "gener')
    again = TraceTracker(TraceSettings(), RunInfo(tmp_path, resumed_from=1))
    note("driver", "backward")
    note("vllm-0", "generate")
    again.log(2, {})
    again.close()
    events = [json.loads(line.rstrip(",")) for line in path.read_text().splitlines()[1:]]
    lanes = {event["args"]["name"]: event["tid"] for event in events if event["name"] == "thread_name"}
    assert len(set(lanes.values())) == len(lanes) == 3
    assert {event["tid"] for event in events if event["name"] == "generate"} == {lanes["vllm-0"]}


def test_prometheus_scrapes_the_newest_values(tmp_path):
    pytest.importorskip("prometheus_client", reason="prometheus-client is not installed")
    from hone.tracking.trackers.prometheus import PrometheusTracker

    key = tmp_path / "key"
    key.write_text("a secret\n")
    tracker = PrometheusTracker(PrometheusSettings(port=0, token_file=str(key)), RunInfo(tmp_path, total_steps=9))
    try:
        tracker.log(1, {"reward/mean": 0.25, "eval/test/exact_match": 0.5, "reward/own part": float("nan")})
        note("driver", "generate")
        note("driver", "")
        tracker.log(2, {"reward/mean": 0.75})
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(tracker.where, timeout=WAIT_S)
        request = urllib.request.Request(tracker.where, headers={"Authorization": "Bearer a secret"})
        text = urllib.request.urlopen(request, timeout=WAIT_S).read().decode()
    finally:
        tracker.close()
    run = f'run="{tmp_path.name}"'
    lines = text.splitlines()
    assert f'hone_reward_mean{{metric="reward/mean",role="",{run},set=""}} 0.75' in lines
    assert f'hone_eval_exact_match{{metric="eval/test/exact_match",role="",{run},set="test"}} 0.5' in lines
    assert f'hone_reward_own_part{{metric="reward/own part",role="",{run},set=""}} NaN' in lines
    assert f"hone_step{{{run}}} 2.0" in lines
    assert any(line.startswith('hone_activity_seconds_total{doing="generate",lane="driver"') for line in lines)
    assert f"# HELP hone_reward_mean {describe_metric('reward/mean').meaning}" in lines
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(request, timeout=WAIT_S)


def test_prometheus_is_not_open_to_other_machines_without_a_token(tmp_path):
    pytest.importorskip("prometheus_client", reason="prometheus-client is not installed")
    from hone.tracking.trackers.prometheus import PrometheusTracker

    with pytest.raises(TrackingError, match=r"host = '192\.0\.2\.1' is reachable from other machines: set token_file"):
        PrometheusTracker(PrometheusSettings(host="192.0.2.1"), RunInfo(tmp_path))


SENDING = """
import sys
from pathlib import Path
from hone.tracking.base import note
from hone.tracking.base import RunInfo
from hone.tracking.settings import OpenTelemetrySettings
from hone.tracking.trackers.opentelemetry import OpenTelemetryTracker

run = RunInfo(Path("sorting"), config={"a": {"b": 1}})
tracker = OpenTelemetryTracker(OpenTelemetrySettings(endpoint=sys.argv[1]), run)
note("driver", "generate")
note("vllm-0", "generate")
note("driver", "backward")
tracker.log(1, {"reward/mean": 0.5, "eval/held out/mean@4": 1.0, "eval/ä/" + "x" * 400: 2.0})
tracker.close("finished")
"""


def test_a_collector_of_opentelemetry_gets_steps_phases_and_metrics():
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="the OTLP exporter is not installed")
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    received = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["content-length"]))
            received.append((self.path, gzip.decompress(body) if self.headers["content-encoding"] == "gzip" else body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *arguments):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Collector) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        done = subprocess.run(
            [sys.executable, "-c", SENDING, address],
            capture_output=True, text=True, timeout=120, check=False, env={**os.environ},
        )  # fmt: skip
        server.shutdown()
    assert done.returncode == 0, done.stderr
    spans, points = {}, {}
    for path, body in received:
        if path == "/v1/traces":
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                assert {one.key: one.value.string_value for one in resource.resource.attributes}[
                    "hone.run"
                ] == "sorting"
                for one in resource.scope_spans[0].spans:
                    lane = next((a.value.string_value for a in one.attributes if a.key == "hone.lane"), "")
                    spans[one.name, lane] = one
        if path == "/v1/metrics":
            for metric in ExportMetricsServiceRequest.FromString(body).resource_metrics[0].scope_metrics[0].metrics:
                (point,) = metric.gauge.data_points
                points[metric.name, point.attributes[0].value.string_value[:20]] = point.as_double
    assert set(spans) == {
        ("step", ""),
        ("generate", "driver"),
        ("backward", "driver"),
        ("generate", "vllm-0"),
        ("run", ""),
    }
    step, phase = spans["step", ""], spans["generate", "driver"]
    assert phase.parent_span_id == step.span_id
    assert (
        step.start_time_unix_nano <= phase.start_time_unix_nano <= phase.end_time_unix_nano <= step.end_time_unix_nano
    )
    assert points == {
        ("hone.reward.mean", "reward/mean"): 0.5,
        ("hone.eval.held_out.mean_4", "eval/held out/mean@4"): 1.0,
        ("hone.eval._." + "x" * 233, "eval/ä/xxxxxxxxxxxxx"): 2.0,
    }
