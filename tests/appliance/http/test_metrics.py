"""What ``/metrics`` says, and that it says no more than its page."""

import re
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from forebay.appliance.histogram import Histogram
from forebay.appliance.metrics import METRICS, render_markdown
from forebay.proto import forebay_pb2 as pb
from tests.appliance.http.conftest import NodeMaker, Served, eventually

ROOT = Path(__file__).resolve().parents[3]
SPECS = {spec.name: spec for spec in METRICS}
BOUNDED = {"namespace", "drive", "state", "protocol", "method", "outcome", "call", "cause", "limit"} | {
    "node",
    "transport",
    "version",
}


class Scrape:
    """One answer of ``/metrics``."""

    def __init__(self, node: Served) -> None:
        self.text = httpx.get(f"{node.url}/metrics", trust_env=False).text
        self.families = {family.name: family for family in text_string_to_metric_families(self.text)}
        self.samples = {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in self.families.values()
            for sample in family.samples
        }

    def value(self, name: str, **labels: str) -> float:
        return self.samples.get((name, frozenset(labels.items())), 0.0)


def test_the_page_is_made_from_the_table() -> None:
    assert (ROOT / "docs" / "metrics.md").read_text() == render_markdown()


def test_names_say_the_unit_last() -> None:
    assert len(SPECS) == len(METRICS)
    for spec in METRICS:
        name = spec.name.removesuffix("_total")
        assert name.startswith("forebay_") and (spec.name.endswith("_total") == (spec.kind == "counter"))
        for unit in ("bytes", "seconds"):
            assert unit not in name or name.endswith(f"_{unit}"), spec.name
        assert set(spec.labels) <= BOUNDED, spec.name
        assert spec.help


def test_what_is_scraped_is_what_the_table_says(node: Served) -> None:
    with node.connect() as client:
        client.put([b"known"], [b"value"])
    found = Scrape(node)
    for family in found.families.values():
        spec = SPECS[f"{family.name}_total" if family.type == "counter" else family.name]
        assert (family.type, family.documentation) == (spec.kind, spec.help) or "_process_" in family.name
        for sample in family.samples:
            assert set(sample.labels) - {"le"} == set(spec.labels)
    absent = {spec.name for spec in METRICS} - {
        f"{family.name}_total" if family.type == "counter" else family.name for family in found.families.values()
    }
    assert not absent


def test_no_word_of_a_client_becomes_a_label(node: Served) -> None:
    with node.connect() as client:
        client.put([b"very-secret-key"], [b"x"])
        httpx.get(f"{node.url}/v1/no-such-path", headers={"x-request-id": "my-request"}, trust_env=False)
        found = Scrape(node)
    assert not re.search("very-secret|no-such-path|my-request", found.text)
    assert found.value("forebay_calls_total", protocol="http", method="other", outcome="unauthenticated") >= 1


def test_numbers_follow_what_happens(node: Served) -> None:
    # One that a busy node could not end in time goes when it expires.
    eventually(lambda: Scrape(node).value("forebay_sessions", namespace="default/default") == 0, "no sessions", 60)
    before = Scrape(node)
    with node.connect() as client:
        client.put([b"a", b"b"], [bytes(4096), bytes(8192)])
        assert [bytes(one.value or b"") for one in client.get([b"a"])] == [bytes(4096)]
        client.get([b"missing"])
        client.match([b"a", b"missing"])
        during = Scrape(node)
        client.delete([b"b"])
    eventually(lambda: Scrape(node).value("forebay_sessions", namespace="default/default") == 0, "no sessions", 60)
    after = Scrape(node)

    def grew(name: str, **labels: str) -> float:
        return during.value(name, **labels) - before.value(name, **labels)

    assert grew("forebay_committed_blocks_total") == 2 and grew("forebay_committed_bytes_total") == 12288
    assert grew("forebay_blocks", namespace="default/default", state="visible") == 2
    assert grew("forebay_lookup_keys_total", call="acquire", outcome="hit") == 1
    assert grew("forebay_lookup_keys_total", call="acquire", outcome="absent") == 1
    assert grew("forebay_lookup_keys_total", call="match", outcome="hit") == 1
    assert grew("forebay_lookup_keys_total", call="match", outcome="absent") == 1
    assert grew("forebay_calls_total", protocol="grpc", method="Match", outcome="ok") == 1
    assert grew("forebay_call_duration_seconds_count", protocol="grpc", method="Match") == 1
    assert 0 < grew("forebay_call_duration_seconds_sum", protocol="grpc", method="Match") < 60
    assert grew("forebay_metadata_commit_duration_seconds_count") >= 1
    assert grew("forebay_target_written_bytes_total") >= 12288 and grew("forebay_target_read_bytes_total") >= 4096
    assert during.value("forebay_sessions", namespace="default/default") == 1
    assert during.value("forebay_target_up") == 1
    assert during.value("forebay_calls_in_flight", protocol="http", method="Metrics") == 1
    used = "forebay_namespace_used_bytes"
    assert during.value(used, namespace="default/default") == during.value("forebay_drive_used_bytes", drive="drive0")
    assert during.value("forebay_drive_capacity_bytes", drive="drive0") == 512 << 20
    assert during.value("forebay_process_resident_memory_bytes") > 0
    assert during.value("forebay_target_process_open_fds") > 0
    removed = "forebay_removed_blocks_total"
    assert after.value(removed, cause="deleted") - before.value(removed, cause="deleted") == 1


def test_fallbacks_are_what_clients_say(node: Served) -> None:
    """Each is told once, by the next heartbeat that is answered; no client makes a label or a number of its own."""
    name = "forebay_transport_fallbacks_total"
    before = Scrape(node)

    def grew() -> list[float]:
        now = Scrape(node)
        return [now.value(name, transport=kind) - before.value(name, transport=kind) for kind in ("block", "rdma")]

    with node.connect() as client:
        session = client._session
        ((choice, _),) = session._transports.values()
        choice._fallbacks["rdma"] += 2
        until_ms = session._clock.monotonic_ms() + 30_000
        for _ in range(2):
            assert session._beat(session.view, until_ms)
        choice._fallbacks["block"] += 1
        assert session._beat(session.view, until_ms)
        eventually(lambda: grew() == [1, 2], "what the session's own thread has taken along is told, too")
        assert client.stats.fallbacks == {"block": 1, "rdma": 2}
        lies = {"carrier pigeon": 5, "block": 1 << 60}
        session.call(
            session.rpc.blocks.Heartbeat,
            lambda _, context: pb.HeartbeatRequest(context=context, fallbacks=lies),
            until_ms,
        )
    assert grew() == [1001, 2]
    assert "pigeon" not in Scrape(node).text


def test_evictions_name_what_was_short(node: Served, http: httpx.Client) -> None:
    http.post("/v1/namespaces", json={"name": "acme/small", "quota_bytes": 1 << 20}).raise_for_status()
    before = Scrape(node)
    with node.connect("acme/small") as client:
        for number in range(24):
            client.put([b"%d" % number], [bytes(60_000)])
    after = Scrape(node)
    removed = "forebay_removed_blocks_total"
    evicted = after.value(removed, cause="evicted") - before.value(removed, cause="evicted")
    by_limit = {
        limit: after.value("forebay_evicted_blocks_total", limit=limit)
        - before.value("forebay_evicted_blocks_total", limit=limit)
        for limit in ("watermark", "quota", "space", "scope_quota")
    }
    assert evicted >= 8 and by_limit["watermark"] + by_limit["quota"] == sum(by_limit.values()) == evicted
    assert after.value("forebay_namespace_used_bytes", namespace="acme/small") <= 1 << 20


def test_metrics_can_be_left_to_administrators(start: NodeMaker) -> None:
    node = start("[http]\nopen_metrics = false\n")
    assert httpx.get(f"{node.url}/metrics", trust_env=False).status_code == 401
    with node.http() as client:
        assert client.get("/metrics").text.startswith("# HELP")
        for path in ("/healthz", "/readyz"):
            assert httpx.get(f"{node.url}{path}", trust_env=False).status_code == 200


def test_a_histogram_counts_values_up_to_their_bucket() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.5):
        histogram.add(value)
    assert histogram.cumulative() == [("1.0", 2.0), ("2.0", 3.0), ("+Inf", 4.0)]
    assert histogram.total == pytest.approx(5.5)
