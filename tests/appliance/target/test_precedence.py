"""Control requests that come late: after a later one, or when another daemon has the target (design §6.4)."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from forebay.appliance.dataplane.target import grants as grants_module
from forebay.appliance.dataplane.target import precedence as precedence_module
from forebay.appliance.dataplane.target.precedence import Order, Precedence
from forebay.appliance.dataplane.target.private_methods import PrivateMethods
from forebay.appliance.dataplane.target.rpc import Method, Params
from forebay.appliance.dataplane.target.volume import Volume
from tests.appliance.target.conftest import HOST, Rig

REGION = 1 << 20


@pytest.fixture
def late() -> Iterator[Callable[[Callable[[], object]], bool]]:
    def refused(call: Callable[[], object]) -> bool:
        with pytest.raises(OSError) as caught:
            call()
        return caught.value.errno == errno.ESTALE

    yield refused


class Requests:
    """The private methods of a rig's server."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self._methods: dict[str, Method] = PrivateMethods(rig.server).table()

    def __call__(self, method: str, **params: object) -> object:
        return self._methods[f"forebay_{method}"].run(Params(params))

    def region(self, what: str, *order: int) -> object:
        given = {"order": list(order)} if order else {}
        return self(f"region_{what}", name="vol", offset_bytes=REGION, length_bytes=REGION, **given)

    def store(self) -> None:
        """What another owner has stored there since."""
        with self.rig.volume.path.open("r+b") as file:
            file.seek(REGION)
            file.write(b"x" * REGION)

    @property
    def stored(self) -> bool:
        return self.rig.stored(REGION // 4096, REGION // 4096) == b"x" * REGION


@pytest.mark.parametrize("what", ["prepare", "release"])
@pytest.mark.parametrize(
    ("before", "after"), [((1, 5), (1, 4)), ((2, 1), (1, 9))], ids=["a later one", "a later incarnation"]
)
def test_what_comes_after_its_turn_is_not_carried_out(
    disk_rig: Rig, late: Callable[..., bool], what: str, before: Order, after: Order
) -> None:
    requests = Requests(disk_rig)
    assert requests.region("prepare", *before) is True
    requests.store()
    assert late(lambda: requests.region(what, *after))
    assert requests.stored
    assert requests.region(what, before[0], before[1] + 1) is True
    assert not requests.stored
    assert requests.region(what) is True, "by hand"


def test_volumes_have_turns_of_their_own(disk_rig: Rig) -> None:
    requests = Requests(disk_rig)
    disk_rig.add_volume("other", 2)
    assert requests.region("prepare", 1, 5) is True
    assert requests("region_prepare", name="other", offset_bytes=0, length_bytes=4096, order=[1, 4]) is True


@pytest.mark.parametrize("order", [[1], [1, 2, 3], [-1, 1], [1, 1 << 63]])
def test_an_order_that_makes_no_sense(disk_rig: Rig, order: list[int]) -> None:
    with pytest.raises(Exception, match="Invalid parameters"):
        Requests(disk_rig).region("release", *order)


def test_an_earlier_daemon_opens_nothing_after_it_was_succeeded(disk_rig: Rig, late: Callable[..., bool]) -> None:
    requests = Requests(disk_rig)
    grant = {"name": "vol", "hosts": [[HOST.nqn, HOST.host_id]], "grants": [[1, 0, 1, 0]]}
    assert requests("grants_add", **grant, order=[1, 1]) is True
    assert requests("teardown_all", incarnation=2) == {"controllers": 0, "grants": 1}
    assert late(lambda: requests("grants_add", **grant, order=[1, 2]))
    assert late(lambda: requests("teardown_all", incarnation=1))
    assert not disk_rig.server.grants.covers("vol", HOST, 0, 1)
    assert requests("teardown_all", incarnation=2) == {"controllers": 0, "grants": 0}
    assert requests("grants_add", **grant, order=[2, 1]) is True
    assert requests("teardown_all") == {"controllers": 0, "grants": 1}, "by hand"


def test_a_grant_that_was_revoked_before_it_came_is_not_opened(disk_rig: Rig, late: Callable[..., bool]) -> None:
    """On a connection that was given up the request may lie longer than its revocation takes on the next one."""
    requests = Requests(disk_rig)

    def add(*order: int) -> object:
        given = {"order": list(order)} if order else {}
        grants = [[1, 0, 1, 0], [2, 1, 1, 0]]
        return requests("grants_add", name="vol", hosts=[[HOST.nqn, HOST.host_id]], grants=grants, **given)

    assert requests("grants_revoke", ids=[2], order=[1, 2]) == {"revoked": 0}
    assert late(lambda: add(1, 1))
    assert not disk_rig.server.grants.covers("vol", HOST, 0, 1), "all or none"
    assert add(1, 3) is True, "a replay opens again what it revoked"
    assert requests("grants_revoke", ids=[1, 2], order=[1, 4]) == {"revoked": 2}
    assert requests("grants_revoke", ids=[1], order=[1, 5]) == {"revoked": 0}
    assert add() is True, "by hand"


def test_an_earlier_daemon_revokes_nothing_after_it_was_succeeded(disk_rig: Rig, late: Callable[..., bool]) -> None:
    """Each counts its grants from 1."""
    requests = Requests(disk_rig)
    assert requests("teardown_all", incarnation=2) == {"controllers": 0, "grants": 0}
    grant = {"name": "vol", "hosts": [[HOST.nqn, HOST.host_id]], "grants": [[1, 0, 1, 0]]}
    assert requests("grants_add", **grant, order=[2, 1]) is True
    assert late(lambda: requests("grants_revoke", ids=[1], order=[1, 9]))
    assert disk_rig.server.grants.covers("vol", HOST, 0, 1)


def test_grants_that_never_come_are_not_remembered_for_ever(disk_rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grants_module, "_MOST_ENDED", 3)
    for number in range(1, 9):
        disk_rig.server.grants.revoke_idle([number], (1, number))
    assert list(disk_rig.server.grants._ended) == [6, 7, 8]


class Held:
    """A turn that has begun, until `end`."""

    def __init__(self, precedence: Precedence, rig: Rig, order: Order) -> None:
        self.begun, self.end = threading.Event(), threading.Event()
        self.over = False
        self._thread = threading.Thread(target=self._run, args=(precedence, rig, order))
        self._thread.start()
        assert self.begun.wait(60)

    def _run(self, precedence: Precedence, rig: Rig, order: Order) -> None:
        with precedence.turn(rig.volume, order):
            self.begun.set()
            assert self.end.wait(60)
            self.over = True

    def __enter__(self) -> Held:
        return self

    def __exit__(self, *_: object) -> None:
        self.end.set()
        self._thread.join()


@pytest.mark.parametrize("next_order", [(1, 2), (2, 1), None], ids=["a later one", "a later incarnation", "by hand"])
def test_a_turn_waits_for_the_one_before(disk_rig: Rig, next_order: Order | None) -> None:
    precedence = Precedence()

    def take() -> bool:
        with precedence.turn(disk_rig.volume, next_order):
            return held.over

    with Held(precedence, disk_rig, (1, 1)) as held, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(take)
        with pytest.raises(TimeoutError):
            waiting.result(0.1)
        held.end.set()
        assert waiting.result(60)


def test_where_something_of_an_earlier_daemon_is_under_way_nothing_is_opened(disk_rig: Rig) -> None:
    """Neither reads nor other volumes have to wait for a drive that hangs."""
    precedence, other = Precedence(), disk_rig.add_volume("other", 2)

    def open_for_writing(volume: Volume, order: Order | None) -> int:
        try:
            with precedence.standing(volume, order):
                return 0
        except OSError as error:
            return error.errno or 0

    with Held(precedence, disk_rig, (1, 1)):
        assert open_for_writing(disk_rig.volume, (1, 2)) == 0, "its own region is closed, and no other is touched"
        precedence.obey(2)
        assert open_for_writing(disk_rig.volume, (2, 1)) == errno.EAGAIN
        assert open_for_writing(disk_rig.volume, None) == 0, "by hand"
        assert open_for_writing(other, (2, 1)) == 0
        assert open_for_writing(other, (1, 3)) == errno.ESTALE
    assert open_for_writing(disk_rig.volume, (2, 2)) == 0


def test_behind_a_drive_that_hangs_nobody_waits_for_ever(disk_rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precedence_module, "_PATIENCE_S", 0.05)
    precedence = Precedence()
    with Held(precedence, disk_rig, (1, 1)):
        with pytest.raises(OSError) as caught, precedence.turn(disk_rig.volume, (1, 2)):
            raise AssertionError("both have a turn")
        assert caught.value.errno == errno.ETIMEDOUT
    with precedence.turn(disk_rig.volume, (1, 2)):
        pass
