"""The way to a node that may not be there: connected in the background, and left alone while it does not answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, cast

import pytest

from forebay.client import Client
from forebay.clock import ManualClock
from forebay.connectors.vllm.link import Link
from forebay.errors import Unauthenticated, Unavailable
from tests.client.conftest import eventually


class Fake:
    """In place of a client."""

    def __init__(self) -> None:
        self.closed = False

    def close(self) -> None:
        self.closed = True


def link_to(open_client: Callable[[], Any], clock: ManualClock) -> Link:
    return Link(cast(Callable[[], Client], open_client), clock, "test")


def test_it_waits_for_the_first_attempt_only() -> None:
    clock, fake = ManualClock(), Fake()
    link = link_to(lambda: fake, clock)
    assert link.wait(60_000) is cast(Any, fake)
    link.close()
    assert fake.closed and link.client is None


def test_a_node_that_is_not_there_is_one_warning_and_no_wait(caplog: pytest.LogCaptureFixture) -> None:
    attempts: list[float] = []

    def refuse() -> Client:
        attempts.append(1)
        raise Unavailable("nobody there")

    link = link_to(refuse, ManualClock())
    assert link.wait(60_000) is None
    assert link.wait(60_000) is None
    eventually(lambda: len(attempts) > 1, "another attempt")
    link.close()
    assert len([r for r in caplog.records if r.levelname == "WARNING"]) == 1


def test_another_reason_why_there_is_no_connection_is_told(caplog: pytest.LogCaptureFixture) -> None:
    reasons = [Unavailable("nobody there"), Unavailable("nobody there"), Unauthenticated("who are you")]

    def refuse() -> Client:
        raise reasons.pop(0) if reasons else Unauthenticated("who are you")

    link = link_to(refuse, ManualClock())
    eventually(lambda: "who are you" in caplog.text, "another attempt")
    link.close()
    assert len([r for r in caplog.records if r.levelname == "WARNING"]) == 2


def test_a_client_that_comes_too_late_is_closed() -> None:
    fake, go_on = Fake(), threading.Event()

    def slow() -> Any:
        go_on.wait(60)
        return fake

    link = link_to(slow, ManualClock())
    link.close()
    go_on.set()
    eventually(lambda: fake.closed, "the client")


def test_a_mistake_of_ours_ends_attempts_and_not_the_engine(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> Client:
        raise RuntimeError("a mistake")

    link = link_to(fail, ManualClock())
    eventually(lambda: "no further attempt" in caplog.text, "the end")
    assert link.client is None
    began = time.monotonic()
    assert link.wait(60_000) is None
    assert time.monotonic() - began < 50, "nothing comes any more, and nobody waits for it"
    link.close()


def test_calls_without_an_answer_make_it_leave_the_node_alone_for_longer_and_longer(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock, fake = ManualClock(), Fake()
    link = link_to(lambda: fake, clock)
    assert link.wait(60_000)
    for reason in ("unavailable", "deadline_exceeded"):
        link.note(["ok", reason])
        assert link.client, "one failure says little"
    link.note(["absent"])
    for _ in range(3):
        assert link.client
        link.note(["connection_lost"])
    for pause_ms in (1_000, 2_000, 4_000, 8_000, 16_000, 30_000, 30_000):
        assert link.client is None
        clock.advance(pause_ms - 1)
        assert link.client is None
        clock.advance(1)
        assert link.client, "one call may try"
        link.note(["unavailable"])
    clock.advance(30_000)
    link.note(["absent"])
    assert link.client
    warnings = [r for r in caplog.records if r.levelname == "WARNING"]
    assert len(warnings) == 1, "an outage is told once"
    link.close()
