"""One drive of two is lost: its blocks are misses, all else goes on, and it comes back if it proves to be itself."""

from __future__ import annotations

import errno
import os
import shutil
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from forebay.client import Client
from tests.disks.faults import EVERYTHING, Faults, Operation
from tests.disks.node import FaultyNode, eventually

pytestmark = pytest.mark.compiler

SIZE = 256 << 10
_PATIENT_MS = 60_000
STARTS = 3 if os.environ.get("FOREBAY_TEST_PROFILE") == "long" else 1
BLOCKS = 320  # more than a region, so that both drives have some


class Stock:
    """Blocks in a node, and what they hold."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.values: dict[bytes, bytes] = {}

    def put(self, name: str, count: int) -> Counter[str]:
        """Store blocks; the reasons, by how often."""
        fresh = {f"{name}{i}".encode(): os.urandom(SIZE) for i in range(count)}
        results = self.client.put(list(fresh), list(fresh.values()), deadline_ms=_PATIENT_MS)
        for (key, value), result in zip(fresh.items(), results, strict=True):
            if result.stored:
                self.values[key] = value
        return Counter(result.reason for result in results)

    def put_more(self, name: str, count: int) -> Counter[str]:
        """`put` of blocks that are not there yet, so that they are written, however often it is asked for."""
        return self.put(f"{name}-{len(self.values)}-", count)

    def get(self) -> Counter[str]:
        """Read all that was acknowledged; the reasons. A hit has the bytes that were stored."""
        results = self.client.get(list(self.values), deadline_ms=_PATIENT_MS)
        for (key, value), result in zip(self.values.items(), results, strict=True):
            if result.hit:
                assert result.value is not None and bytes(result.value) == value, key
        return Counter(result.reason for result in results)

    def whole(self) -> bool:
        """Whether all of it is read."""
        return self.get() == {"ok": len(self.values)}


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Faults:
    return Faults(tmp_path_factory.mktemp("faults"))


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory, faults: Faults) -> Iterator[FaultyNode]:
    folder = tmp_path_factory.mktemp("node")
    served = FaultyNode(folder, faults, [folder / "a", folder / "b"], capacity="512MiB")
    yield served
    served.stop()


@pytest.fixture(scope="module")
def stock(node: FaultyNode) -> Iterator[Stock]:
    with node.client() as client:
        held = Stock(client)
        assert held.put("first", BLOCKS) == {"ok": BLOCKS}
        yield held


@pytest.fixture(autouse=True)
def well(node: FaultyNode, stock: Stock, faults: Faults) -> Iterator[None]:
    """Every test begins with both drives there, and leaves them so."""
    assert stock.whole()
    yield
    faults.clear()
    eventually(lambda: set(drives(node).values()) == {"serving"} and stock.whole(), "all is well again")


def drives(node: FaultyNode) -> dict[str, str]:
    return {drive.name: drive.state for drive in node.status().drives}


def test_a_drive_that_fails_in_everything_takes_only_its_own_blocks(
    node: FaultyNode, stock: Stock, faults: Faults
) -> None:
    lost_before = node.metric("forebay_drives_lost_total")
    number = faults.set(node.drives[1] / "*", EVERYTHING)
    found = stock.get()
    assert found["ok"] and found["ok"] + found["target_failed"] + found["unavailable"] == len(stock.values)
    eventually(lambda: drives(node) == {"drive0": "serving", "drive1": "away"}, "the loss is noticed")
    assert faults.failed(number)
    eventually(lambda: set(stock.get()) == {"ok", "unavailable"}, "clients know where blocks are")
    body = node.degraded()
    assert body["writes"]
    assert [p["part"] for p in body["problems"]] == ["drives"] and str(node.drives[1]) in body["problems"][0]["reason"]
    eventually(lambda: node.metric('forebay_drive_up{drive="drive1"}') == 0, "metrics know")
    assert node.metric("forebay_drives_lost_total") == lost_before + 1
    assert node.metric('forebay_lookup_keys_total{call="acquire",outcome="unavailable"}') > 0
    # what is new goes to the drive that lives, and so does a lost block that is stored again
    assert stock.put("while-lost", 40) == {"ok": 40}
    missing = [k for k, r in zip(stock.values, stock.client.get(list(stock.values)), strict=True) if not r.hit]
    assert stock.client.match(missing[:1]).present == (False,)
    again = stock.client.put(missing[:1], [stock.values[missing[0]]])
    assert again[0].stored, again
    assert stock.client.get(missing[:1])[0].hit
    faults.clear()
    eventually(lambda: drives(node)["drive1"] == "serving", "the drive is back")
    eventually(stock.whole, "its blocks are served again")
    assert node.metric('forebay_removed_blocks_total{cause="lost"}') == 1


def test_events_tell_of_a_drive(node: FaultyNode, stock: Stock, faults: Faults) -> None:
    with node.client() as watcher, ThreadPoolExecutor(1) as listening:
        events = watcher.watch()
        first = listening.submit(next, events)
        eventually(lambda: stock.put_more("heard", 1) and first.done(), "what happens from now on is heard")
        with faults.during(node.drives[1] / "*", EVERYTHING):
            eventually(lambda: drives(node)["drive1"] == "away", "the loss is noticed")
        eventually(lambda: drives(node)["drive1"] == "serving", "the drive is back")
        told: list[tuple[str, str]] = []
        for event in events:
            told.append((event.kind, event.reason))
            if event.kind == "restored":
                break
    assert ("degraded", "drive drive1 is away") in told


def test_a_flush_that_fails_fails_the_commit_and_the_next_one_is_not_believed(
    node: FaultyNode, stock: Stock, faults: Faults
) -> None:
    number = faults.set(node.drives[1] / "volumes/*", Operation.SYNC)
    results = stock.put("unflushed", 200)
    if not faults.failed(number):  # all went to the other drive
        results += stock.put("more-unflushed", 300)
    assert faults.failed(number)
    assert results["target_failed"], results
    eventually(lambda: drives(node)["drive1"] != "serving", "the drive takes no more writes")
    assert stock.whole(), "it is read"
    assert stock.put("elsewhere", 20) == {"ok": 20}
    faults.clear()
    eventually(lambda: drives(node)["drive1"] == "serving", "its volumes are opened anew")
    assert stock.whole()


def test_a_drive_that_can_only_be_read_is_read(node: FaultyNode, stock: Stock, faults: Faults) -> None:
    kept_from_use = node.metric('forebay_drive_quarantined_bytes{drive="drive1"}')
    number = faults.set(
        node.drives[1] / "*", Operation.WRITE | Operation.CREATE | Operation.SYNC | Operation.ALLOCATE, errno.EROFS
    )
    eventually(
        lambda: stock.put_more("onto-read-only", 40) and drives(node)["drive1"] == "read_only",
        "it takes no more writes",
    )
    assert faults.failed(number)
    assert stock.whole()
    quarantined = node.metric('forebay_drive_quarantined_bytes{drive="drive1"}')
    assert quarantined == kept_from_use, "it is the drive, not the place"
    body = node.degraded()
    assert body["writes"] and "only read" in body["problems"][0]["reason"]
    assert stock.put("elsewhere-again", 20) == {"ok": 20}


def test_no_space_where_space_was_promised(node: FaultyNode, stock: Stock, faults: Faults) -> None:
    """A thin drive: regions were reserved, and there is no room for what is written to them."""
    number = faults.set(node.drives[1] / "*", Operation.WRITE | Operation.CREATE, errno.ENOSPC)
    reasons: Counter[str] = Counter()

    def refused() -> bool:
        reasons.update(stock.put(f"thin{reasons.total()}-", 40))
        return bool(faults.failed(number)) and drives(node)["drive1"] == "read_only"

    eventually(refused, "it takes no more writes")
    assert set(reasons) <= {"ok", "no_space"} and reasons["no_space"]
    assert stock.whole()
    assert "no space left" in node.degraded()["problems"][0]["reason"]
    assert stock.put("not-thin", 20) == {"ok": 20}


def test_a_place_that_cannot_be_written_is_not_given_out_again(node: FaultyNode, stock: Stock, faults: Faults) -> None:
    number = faults.set(node.drives[1] / "volumes/*", Operation.WRITE, errno.EIO, times=1)
    reasons: Counter[str] = Counter()
    while not faults.failed(number):  # one at a time: of neighbours that go together each gets a second chance
        reasons += stock.put(f"bad-place-{reasons.total()}-", 1)
        assert reasons.total() < 1000, "nothing is written to the drive"
    assert faults.failed(number) == 1 and reasons["target_failed"] == 1, reasons
    eventually(lambda: node.metric('forebay_drive_quarantined_bytes{drive="drive1"}') == SIZE, "it is kept from use")
    assert drives(node)["drive1"] == "serving"
    with node.admin() as admin:
        assert [entry.reason for entry in admin.list_quarantine()] == ["write_error"]
    assert node.metric('forebay_drive_errors_total{drive="drive1"}') > 0


def test_a_node_starts_without_a_drive_and_takes_it_back(node: FaultyNode, stock: Stock, faults: Faults) -> None:
    """Its labels are of an earlier epoch then; and another drive in its place is not taken for it."""
    away = node.drives[1].with_name("b-unmounted")
    total = len(stock.values)
    node.stop()
    node.drives[1].rename(away)
    node.drives[1].mkdir()  # an empty mount point
    for left in reversed(range(STARTS)):
        node.start()
        assert "is the drive mounted?" in node.degraded()["problems"][0]["reason"]
        if left:
            node.kill()
    with node.client() as client:
        held = Stock(client)
        held.values = stock.values
        found = held.get()
        assert found["ok"] and found["unavailable"] and found.total() == total
        # namespaces come and go meanwhile
        with node.admin() as admin:
            admin.create_namespace("acme/new")
        # somebody mounts the other drive there as well: it is not the one
        node.drives[1].rmdir()
        node.drives[1].symlink_to(node.drives[0])
        eventually(lambda: "is drive" in str(node.ready()[1]["problems"]), "another drive is refused")
        assert held.get()["unavailable"]
        node.drives[1].unlink()
        away.rename(node.drives[1])
        eventually(lambda: drives(node)["drive1"] == "serving", "the drive is back")
        eventually(held.whole, "its blocks are served again")
        assert len(list((node.drives[1] / "volumes").glob("*.vol"))) == 2
    node.stop()
    node.start()
    assert node.ready()[1]["problems"] == []
    stock.client.close()
    stock.client = node.client()
    assert stock.whole()


def test_a_drive_that_is_gone_for_good_is_given_up_for_a_new_one(
    node: FaultyNode, stock: Stock, faults: Faults
) -> None:
    node.stop()
    assert "drive0, drive1" in node.refused("--forget-drive", "drive7")
    shutil.rmtree(node.drives[1])
    node.drives[1].mkdir()
    node.start("--forget-drive", "drive1")
    assert drives(node) == {"drive0": "serving", "drive1": "serving"}
    with node.client() as client:
        held = Stock(client)
        held.values = stock.values
        found = held.get()
        assert found["ok"] and found["absent"] and found.total() == found["ok"] + found["absent"]
        for key in [k for k, r in zip(stock.values, client.get(list(stock.values)), strict=True) if not r.hit]:
            del stock.values[key]
    stock.client.close()
    stock.client = node.client()
    eventually(lambda: any((node.drives[1] / "volumes").glob("*.vol")), "namespaces get a volume on the new drive")
    eventually(
        lambda: (
            stock.put(f"new{len(stock.values)}-", 40) == {"ok": 40}
            and node.metric('forebay_drive_used_bytes{drive="drive1"}') > 0
        ),
        "blocks go there",
    )
    assert stock.whole()
