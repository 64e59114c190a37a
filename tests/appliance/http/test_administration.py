"""Administration over HTTP: what changes, who may, and how a refusal looks."""

import dataclasses
import json
import re
import socket
from typing import Any

import httpx
import pytest

from forebay.appliance.control.http_server import HttpServer
from forebay.appliance.settings import Endpoint
from forebay.errors import ConfigInvalid, NamespaceNotFound, Unauthenticated
from tests.appliance.http.conftest import NodeMaker, Served, eventually


def refused(answer: httpx.Response, status: int, error: str, field: str = "") -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    body: dict[str, Any] = answer.json()
    assert body.keys() == {"code", "error", "message", "field", "limit", "retry_after_ms"}
    assert (body["error"], body["field"]) == (error, field or body["field"])
    return body


class TestNamespaces:
    def test_one_is_created_read_changed_and_deleted(self, http: httpx.Client) -> None:
        made = http.post("/v1/namespaces", json={"name": "acme/life", "quota_bytes": 1 << 30, "durability": "verify"})
        assert made.status_code == 201
        assert http.get("/v1/namespaces/acme/life").json() == made.json()
        changed = http.patch("/v1/namespaces/acme/life", json={"ttl_ms": 5000, "eviction": None}).json()
        assert changed == made.json() | {"ttl_ms": 5000}
        assert "acme/life" in [one["name"] for one in http.get("/v1/namespaces").json()]
        assert http.delete("/v1/namespaces/acme/life").json() == {"blocks": 0, "bytes": 0}
        refused(http.get("/v1/namespaces/acme/life"), 404, "NamespaceNotFound")

    def test_both_protocols_show_the_same(self, node: Served, http: httpx.Client) -> None:
        http.post("/v1/namespaces", json={"name": "acme/same", "quota_bytes": 123 << 20}).raise_for_status()
        with node.admin() as admin:
            found = {one.name: dataclasses.asdict(one) for one in admin.list_namespaces()}
        shown = json.loads(json.dumps(found["acme/same"]))
        over_http = http.get("/v1/namespaces/acme/same").json()
        assert shown == {name: over_http[name] for name in shown}

    def test_the_minimum_generation_can_only_be_raised(self, http: httpx.Client) -> None:
        http.post("/v1/namespaces", json={"name": "acme/generations"}).raise_for_status()
        path = "/v1/namespaces/acme/generations"
        assert http.patch(path, json={"min_generation": 7}).json()["min_generation"] == 7
        body = refused(http.patch(path, json={"min_generation": 6}), 409, "StaleGeneration", "min_generation")
        assert body["limit"] == 7

    def test_a_scope_gets_a_bound_and_loses_it(self, http: httpx.Client) -> None:
        http.post("/v1/namespaces", json={"name": "acme/scopes"}).raise_for_status()
        path = "/v1/namespaces/acme/scopes/scopes/tenant-7"
        bounded = http.put(path, json={"quota_bytes": 1 << 20}).json()
        assert bounded["scopes"] == [{"scope": "tenant-7", "quota_bytes": 1 << 20, "used_bytes": 0}]
        assert http.put(path, json={"quota_bytes": 0}).json()["scopes"] == []

    def test_one_with_blocks_is_deleted_by_force_alone(self, node: Served, http: httpx.Client) -> None:
        http.post("/v1/namespaces", json={"name": "acme/full"}).raise_for_status()
        with node.connect("acme/full") as client:
            assert client.put([b"key"], [bytes(10_000)])[0].stored
            shown = http.get("/v1/namespaces/acme/full").json()
            assert (shown["blocks"], shown["sessions"]) == (1, 1) and shown["used_bytes"] >= 10_000
        refused(http.delete("/v1/namespaces/acme/full"), 400, "InvalidArgument", "force")
        assert http.delete("/v1/namespaces/acme/full", params={"force": True}).json()["blocks"] == 1

    def test_a_second_of_the_same_name_is_refused(self, http: httpx.Client) -> None:
        http.post("/v1/namespaces", json={"name": "acme/twice"}).raise_for_status()
        refused(http.post("/v1/namespaces", json={"name": "acme/twice"}), 409, "AlreadyExists", "name")


class TestPrincipals:
    def test_one_gets_rights_and_loses_them(self, node: Served, http: httpx.Client) -> None:
        http.post("/v1/namespaces", json={"name": "acme/rights"}).raise_for_status()
        token = http.post("/v1/principals", json={"name": "reader"}).json()["token"]
        with pytest.raises(NamespaceNotFound):
            node.connect("acme/rights", token)
        grant = {"namespace": "acme/rights", "rights": ["read", "write"], "scopes": []}
        assert http.put("/v1/principals/reader/grants", json=grant).json()["grants"] == [grant]
        with node.connect("acme/rights", token) as client:
            assert client.put([b"key"], [b"value"])[0].stored
            found = http.get("/v1/sessions", params={"principal": "reader"}).json()
            assert [(one["namespace"], one["state"], one["hosts"]) for one in found] == [("acme/rights", "open", 1)]
            assert found[0]["age_ms"] >= found[0]["idle_ms"] >= 0
            assert http.get("/v1/sessions", params={"namespace": "default/default"}).json() == []
        http.put("/v1/principals/reader/grants", json=grant | {"rights": []}).raise_for_status()
        with pytest.raises(NamespaceNotFound):
            node.connect("acme/rights", token)

    def test_a_new_token_ends_the_old_one(self, node: Served, http: httpx.Client) -> None:
        old = http.post("/v1/principals", json={"name": "turned", "admin": True}).json()["token"]
        new = http.post("/v1/principals/turned/token").json()["token"]
        with node.http(old) as client:
            refused(client.get("/v1/node"), 401, "Unauthenticated")
        with node.http(new) as client:
            assert client.get("/v1/node").status_code == 200
        with pytest.raises(Unauthenticated):
            node.connect(token=old)

    def test_the_last_administrator_stays(self, http: httpx.Client) -> None:
        for one in http.get("/v1/principals").json():
            if one["admin"] and one["name"] != "admin":
                assert http.delete(f"/v1/principals/{one['name']}").status_code == 204
        refused(http.delete("/v1/principals/admin"), 400, "InvalidArgument", "name")
        assert http.get("/v1/principals/admin").json()["admin"]

    def test_what_does_not_exist_is_not_found(self, http: httpx.Client) -> None:
        for answer in (
            http.get("/v1/principals/nobody"),
            http.delete("/v1/principals/nobody"),
            http.post("/v1/principals/nobody/token"),
            http.put("/v1/principals/nobody/grants", json={"namespace": "*", "rights": ["read"]}),
        ):
            refused(answer, 404, "NotFound", "principal")
        grant = {"namespace": "no/where", "rights": ["read"]}
        refused(http.put("/v1/principals/admin/grants", json=grant), 404, "NamespaceNotFound", "grant.namespace")


class TestTheEdge:
    def test_administration_needs_an_administrator(self, node: Served, http: httpx.Client) -> None:
        token = http.post("/v1/principals", json={"name": "plain"}).json()["token"]
        with node.http(token) as client:
            refused(client.get("/v1/namespaces"), 403, "PermissionDenied")
        for headers in ({}, {"authorization": "Basic YTpi"}, {"authorization": "Bearer wrong"}):
            answer = httpx.get(f"{node.url}/v1/namespaces", headers=headers, trust_env=False)
            refused(answer, 401, "Unauthenticated", "token")
            assert answer.headers["www-authenticate"] == "Bearer"

    def test_who_is_not_known_does_not_learn_what_is_wrong_with_the_request(self, node: Served) -> None:
        for path in ("/v1/namespaces", "/v1/no-such-thing"):
            answer = httpx.post(f"{node.url}{path}", content=b"{", trust_env=False)
            refused(answer, 401, "Unauthenticated")

    @pytest.mark.parametrize(
        ("body", "field", "limit"),
        [
            ({"name": "acme/" + "x" * 200}, "name", 129),
            ({"name": "acme/x", "quota_bytes": -1}, "quota_bytes", 0),
            ({"name": "acme/x", "quota_bytes": 1 << 53}, "quota_bytes", (1 << 53) - 1),
            ({"name": "acme/x", "durability": "perhaps"}, "durability", "'flush', 'verify' or 'volatile'"),
            ({"name": "acme/x", "qouta_bytes": 1}, "qouta_bytes", None),
            ([], "body", None),
        ],
    )
    def test_a_wrong_request_is_told_where(self, http: httpx.Client, body: Any, field: str, limit: Any) -> None:
        answer = http.post("/v1/namespaces", json=body)
        refused(answer, 400, "InvalidArgument", field)
        assert answer.json()["limit"] == limit

    @pytest.mark.parametrize("name", ["acme", "acme/..", "a/b/c"])
    def test_a_name_is_told_its_form(self, http: httpx.Client, name: str) -> None:
        answer = http.post("/v1/namespaces", json={"name": name})
        refused(answer, 400, "InvalidArgument", "name")
        assert "/" in answer.json()["limit"]

    @pytest.mark.parametrize("query", ["forse=true", "force=true&x=", "=1", "force=perhaps"])
    def test_a_parameter_that_means_nothing_is_refused(self, http: httpx.Client, query: str) -> None:
        refused(http.delete(f"/v1/namespaces/default/default?{query}"), 400, "InvalidArgument")
        assert http.get("/v1/namespaces/default/default").status_code == 200

    def test_what_is_not_json_is_refused(self, http: httpx.Client) -> None:
        for content in (b"{", b"", b"\xff\xfe", b"null"):
            answer = http.post("/v1/namespaces", content=content, headers={"content-type": "application/json"})
            refused(answer, 400, "InvalidArgument", "body")
        answer = http.post("/v1/namespaces", content=b'{"name": "acme/x"}')
        refused(answer, 400, "InvalidArgument", "body")
        assert "Content-Type: application/json" in answer.json()["message"]

    def test_a_long_body_is_refused_before_it_is_read(self, http: httpx.Client) -> None:
        refused(http.post("/v1/namespaces", content=b" " * (300 << 10)), 400, "InvalidArgument", "body")
        pieces = (b" " * 65_536 for _ in range(8))
        refused(http.post("/v1/namespaces", content=pieces), 400, "InvalidArgument", "body")

    def test_a_path_that_is_not_there_and_a_method_that_it_has_not(self, http: httpx.Client) -> None:
        refused(http.get("/v1/nothing"), 404, "NotFound", "path")
        answer = http.put("/v1/namespaces/acme/x")
        refused(answer, 405, "InvalidArgument", "path")
        assert answer.headers["allow"] == "DELETE, GET, PATCH"

    def test_a_request_has_a_deadline(self, http: httpx.Client) -> None:
        for wrong in ("0", "600001", "soon", ""):
            answer = http.get("/v1/node", headers={"x-deadline-ms": wrong})
            refused(answer, 400, "InvalidArgument", "x-deadline-ms")
        assert http.get("/v1/node", headers={"x-deadline-ms": "600000"}).status_code == 200

    def test_a_request_keeps_its_id_or_gets_one(self, node: Served, http: httpx.Client) -> None:
        answer = http.get("/v1/node", headers={"x-request-id": "mine-1"})
        assert answer.headers["x-request-id"] == "mine-1" and answer.headers["cache-control"] == "no-store"
        for bad in ("two words", "x" * 65, "line\tbreak", ""):
            made = http.get("/healthz", headers={"x-request-id": bad}).headers["x-request-id"]
            assert made not in ("", bad) and made.isalnum()

    def test_a_connection_that_says_nothing_holds_up_nobody(self, node: Served, http: httpx.Client) -> None:
        host, _, port = node.url.removeprefix("http://").rpartition(":")
        with socket.create_connection((host, int(port))) as idle:
            idle.sendall(b"POST /v1/namespaces HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n")
            assert http.get("/v1/node").status_code == 200


def test_the_node_is_described(node: Served, http: httpx.Client) -> None:
    shown = http.get("/v1/node").json()
    with node.admin() as admin:
        status = admin.status()
    assert (shown["node"], shown["incarnation"]) == (status.node, status.incarnation)
    assert shown["target"]["pid"] == status.target_pid and shown["target"]["restarts"] == 0
    assert shown["capacity_bytes"] == 512 << 20 and shown["drives"][0]["capacity_bytes"] == 512 << 20
    assert json.loads((node.data / "node.json").read_text())["http"] == node.url.removeprefix("http://")


def test_sessions_are_listed_to_a_limit(node: Served, http: httpx.Client) -> None:
    with node.connect() as first, node.connect() as second:
        assert first is not second
        eventually(lambda: len(http.get("/v1/sessions").json()) >= 2, "both sessions")
        assert len(http.get("/v1/sessions", params={"limit": 1}).json()) == 1
    refused(http.get("/v1/sessions", params={"namespace": "no/such"}), 404, "NamespaceNotFound", "namespace")
    refused(http.get("/v1/sessions", params={"principal": "nobody"}), 404, "NotFound", "principal")


def test_a_node_without_http_listens_nowhere_for_it(start: NodeMaker) -> None:
    node = start("[http]\nenabled = false\n")
    assert "http" not in node.about and "http://" not in node.log.read_text()
    with node.admin() as admin:
        assert admin.status().target_pid


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "no.such.host.invalid"])
def test_an_address_that_cannot_be_had_is_named(host: str) -> None:
    with socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigInvalid, match="cannot listen on") as caught:
            HttpServer(nothing).start(Endpoint(host, port))
    assert caught.value.field == "http.listen"


async def nothing(scope: Any, receive: Any, send: Any) -> None:
    raise AssertionError("nobody asks")


def test_a_scrub_is_begun_watched_and_ended(http: httpx.Client, node: Served) -> None:
    http.post("/v1/namespaces", json={"name": "t/scrubbed"})
    with node.connect("t/scrubbed") as client:
        client.put([b"a", b"b"], [b"x" * 5000, b"y" * 5000])
    begun = http.post("/v1/scrub", json={"namespace": "t/scrubbed", "rate_bytes_per_s": 1})
    assert begun.status_code == 202 and begun.json()["state"] == "running"
    assert http.post("/v1/scrub").status_code == http.post("/v1/scrub", json={}).status_code == 429
    assert http.delete("/v1/scrub").json()["state"] == "stopped"
    assert http.post("/v1/scrub", json={"namespace": "no/where"}).status_code == 404
    http.post("/v1/scrub", json={"namespace": "t/scrubbed"})
    eventually(lambda: http.get("/v1/scrub").json()["state"] == "done", "the scrub ends")
    found = http.get("/v1/scrub").json()
    assert (found["blocks"], found["bad"], found["namespace"]) == (2, 0, "t/scrubbed")
    counted = re.search(r"^forebay_scrubbed_blocks_total (\d+)", http.get("/metrics").text, re.MULTILINE)
    assert counted is not None and int(counted[1]) >= 2  # the node looks by itself too
    assert http.get("/v1/quarantine").json() == []
    refused(http.delete("/v1/quarantine/1/0"), 404, "NotFound", "offset_bytes")
