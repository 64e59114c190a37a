"""The daemon's connections to its target cut at every request and answer: nothing is restarted, nothing is left."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from forebay.client import Admin, Client
from forebay.client.session import Opening
from forebay.errors import ForebayError
from forebay.schema import Schema
from forebay.testing.proxy import Action, Cut, FaultProxy, Moment
from forebay.testing.steps import JsonRpcSteps
from tests.pressure.conftest import CALM, HANG_S, Node, eventually

pytestmark = pytest.mark.embedded  # the steps are its calls

RPC_MS = 1_000
PROBE = "forebay_get_info"
FAULTS = [(Moment.BEFORE, Action.CLOSE), (Moment.INSIDE, Action.CLOSE), (Moment.AFTER, Action.CLOSE)]
FAULTS += [(Moment.BEFORE, Action.SILENCE), (Moment.AFTER, Action.SILENCE)]
STEPS = {
    f"{method}.{part}"
    for method in (
        *("forebay_grants_add", "forebay_seal", "forebay_grants_revoke", "forebay_region_prepare"),
        *("nvmf_subsystem_add_host", "nvmf_ns_add_host", "nvmf_subsystem_remove_host", "nvmf_ns_remove_host"),
        *("forebay_host_teardown", "bdev_aio_create", "nvmf_subsystem_add_ns", "nvmf_subsystem_remove_ns"),
        *("bdev_aio_delete", "nvmf_create_subsystem", "nvmf_subsystem_add_listener", "nvmf_delete_subsystem"),
    )
    for part in ("request", "response")
}
"""What must be among the steps; whatever else there is, is cut as well."""


class Proxied(Node):
    """A node that reaches its target through a proxy: the socket that it knows is the proxy's."""

    def __init__(self, data: Path) -> None:
        super().__init__(data, FOREBAY_TARGET_ON_STOP="keep", FOREBAY_TARGET_RPC_TIMEOUT=f"{RPC_MS}ms")
        self.target_process = self.target.pid
        self.process.terminate()
        self.process.wait(60)
        path = Path(str(self._target()["socket"]))
        real = path.with_name("real.sock")
        path.rename(real)
        self.proxy = FaultProxy(real, JsonRpcSteps, listen=path)
        self.start()

    def stop(self) -> None:
        super().stop()
        self.proxy.close()
        with suppress(ProcessLookupError):
            os.kill(self.target_process, signal.SIGKILL)


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxied]:
    made = Proxied(tmp_path_factory.mktemp("proxied") / "data")
    yield made
    made.stop()


def work(node: Node, name: str) -> bool:
    """Something of everything for which a daemon asks its target; whether all of it worked."""
    began_s = time.monotonic()
    try:
        opening = Opening("default/default", Schema.opaque(), 0)
        with Client(node.url, opening, token=node.token, options=CALM) as client:
            keys = [f"{name}/{began_s}/{i}".encode() for i in range(3)]
            values = [keys[0] * 100, keys[1] * 5_000, keys[2] * 40_000]
            stored = client.put(keys[:2], values[:2])
            plan = client.allocate(keys[2:], lengths=[len(values[2])])
            client.abort(plan)
            found = client.get(keys[:2])
            for got, value in zip(found, values, strict=False):
                assert not got.hit or bytes(got.value or b"") == value, f"{name}: wrong bytes"
            good = all(s.stored for s in stored) and all(f.hit for f in found) and plan.writes[0].code == 0
        with Admin(node.url, token=node.token, deadline_ms=30_000, attempt_ms=10_000) as admin:
            for namespace in admin.list_namespaces():
                if namespace.name == "other/kv":
                    admin.delete_namespace("other/kv", force=True)
            admin.create_namespace("other/kv")
            admin.delete_namespace("other/kv", force=True)
    except ForebayError:
        good = False
    took_s = time.monotonic() - began_s
    assert took_s < CALM.deadline_ms / 1000 + HANG_S, f"{name}: took {took_s:.1f} s"
    return good


def steps(node: Proxied) -> set[str]:
    node.proxy.seen.clear()
    assert work(node, "none")
    return set(node.proxy.seen)


def cut_at(node: Proxied, cut: Cut) -> None:
    name = f"{cut.step}.{cut.moment.value}.{cut.action.value}"
    node.proxy.arm(cut)
    before = node.proxy.cuts
    eventually(lambda: work(node, name) and node.proxy.cuts > before, f"{name}: recovery", 120)
    if cut.step.startswith(PROBE):  # some in a row that fail are a target that hangs, and this was one
        answers = node.proxy.seen[f"{PROBE}.response"]
        eventually(lambda: node.proxy.seen[f"{PROBE}.response"] > answers + 1, "a probe is answered")
    told: list[int] = []
    with Admin(node.url, token=node.token, deadline_ms=30_000, attempt_ms=10_000) as admin:
        # 0 while the question itself is what was cut

        def tells() -> bool:
            told.append(admin.status().target_pid)
            return told[-1] > 0

        eventually(tells, f"{name}: the target's pid")
    assert told[-1] == node.target_process, f"{name}: the target was replaced"
    assert node.process.poll() is None


def test_what_is_asked_of_a_target(node: Proxied) -> None:
    missing = STEPS - steps(node)
    assert not missing, f"not among the steps: {missing}"


def test_one_cut_of_each_kind(node: Proxied) -> None:
    cut_at(node, Cut("forebay_grants_add.request", Moment.AFTER, Action.CLOSE))
    cut_at(node, Cut("nvmf_subsystem_add_host.request", Moment.BEFORE, Action.SILENCE))
    node.expect_nothing_held()


@pytest.mark.long
@pytest.mark.parametrize(("moment", "action"), FAULTS, ids=[f"{m.value}-{a.value}" for m, a in FAULTS])
def test_cut_at_every_request(node: Proxied, moment: Moment, action: Action) -> None:
    for step in sorted(steps(node)):
        cut_at(node, Cut(step, moment, action))
    node.expect_nothing_held()  # a host whose answer was lost goes with the next comparison, within half a minute
