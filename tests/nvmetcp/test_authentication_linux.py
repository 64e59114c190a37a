"""Transactions that were recorded with Linux 6.12's target as controller: our host's messages, then in its place ours.

The secrets were made for it; the host drew 1, 2, 3, ... for random. `tests/interop/test_nvmet.py` asks Linux itself.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from forebay.nvmetcp import spec
from forebay.nvmetcp.authentication import ControllerAuthentication, HostAuthentication, Step
from forebay.nvmetcp.secret import HostSecrets, Secret
from forebay.nvmetcp.spec import DhchapHash, DhGroup

RECORDED = json.loads((Path(__file__).parent / "golden" / "dhchap_linux.json").read_text())
IDS = [f"{one['hash']}-{one['group']}" for one in RECORDED]


def secrets_of(one: dict[str, Any]) -> HostSecrets:
    return HostSecrets(Secret.parse(one["host_secret"]), Secret.parse(one["controller_secret"]))


def messages(one: dict[str, Any]) -> list[bytes]:
    assert [end for end, _ in one["messages"]] == ["host", "controller", "host", "controller", "host"]
    return [bytes.fromhex(text) for _, text in one["messages"]]


@pytest.mark.parametrize("one", RECORDED, ids=IDS)
def test_host(one: dict[str, Any]) -> None:
    numbers = itertools.count(1)
    host = HostAuthentication(
        secrets_of(one),
        one["host_nqn"],
        one["subsystem_nqn"],
        1,
        random=lambda length: bytes(next(numbers) & 0xFF for _ in range(length)),
    )
    start, challenge, reply, success, last = messages(one)
    assert host.start() == start
    assert host.received(challenge) == reply
    assert host.received(success) == last
    assert host.step is Step.AUTHENTICATED


@pytest.mark.parametrize("one", [one for one in RECORDED if one["group"] == "null"], ids=lambda one: str(one["hash"]))
def test_controller(one: dict[str, Any]) -> None:
    """With the bytes that Linux drew this end sends what Linux sent."""
    start, challenge, reply, success, last = messages(one)
    layout = spec.DHCHAP_CHALLENGE
    drawn = iter([challenge[layout.size :], challenge[layout.size - 4 : layout.size]])
    controller = ControllerAuthentication(
        secrets_of(one),
        one["host_nqn"],
        one["subsystem_nqn"],
        hashes=(DhchapHash[one["hash"].upper()],),
        groups=(DhGroup.NULL,),
        random=lambda length: next(drawn),
    )
    controller.received(start)
    assert controller.due == challenge
    controller.delivered()
    controller.received(reply)
    assert controller.due == success
    controller.delivered()
    controller.received(last)
    assert controller.step is Step.AUTHENTICATED
