"""DH-HMAC-CHAP with somebody in the place of one end who has no secret: any messages, and damaged ones of real ends."""

from __future__ import annotations

import random

from forebay.nvmetcp.authentication import (
    AuthenticationFailed,
    ControllerAuthentication,
    HostAuthentication,
    Step,
)
from forebay.nvmetcp.secret import HostSecrets, Secret
from forebay.nvmetcp.spec import DhGroup
from tests.fuzz.decoders import changed
from tests.fuzz.source import Source

__all__ = ["run"]

_HOST, _SUBSYSTEM = "nqn.2014-08.org.nvmexpress:uuid:1", "nqn.2026-01.io.forebay:fuzz"
_TRUE = HostSecrets(Secret(bytes(range(32))), Secret(bytes(range(32, 64))))
_FALSE = HostSecrets(Secret(bytes(32)), Secret(bytes(48)))


def run(data: bytes) -> None:
    """Nobody is taken for somebody else, and nothing but `AuthenticationFailed` is raised."""
    source = Source(data)
    lies = source.below(2) == 0
    groups = (DhGroup.FFDHE2048,) if source.chance(8) else (DhGroup.NULL,)  # an exchange takes long
    dice = random.Random(1).randbytes
    host = HostAuthentication(
        _FALSE if lies else _TRUE, _HOST, _SUBSYSTEM, source.below(1 << 16), groups=groups, random=dice
    )
    controller = ControllerAuthentication(_TRUE if lies else _FALSE, _HOST, _SUBSYSTEM, groups=groups, random=dice)
    message: bytes | None = host.start()
    try:
        for _ in range(4):
            if message is None or controller.step in (Step.FAILED, Step.AUTHENTICATED):
                break
            controller.received(_sent(source, message) if lies else message)
            answer = controller.due
            if answer is None:
                break
            controller.delivered()
            if host.step in (Step.FAILED, Step.AUTHENTICATED):
                break
            message = host.received(answer if lies else _sent(source, answer))
    except AuthenticationFailed as failed:
        assert host.step is Step.FAILED
        assert failed.answer is None or len(failed.answer) == 8
    honest = controller if lies else host
    assert honest.step is not Step.AUTHENTICATED, "somebody without the secret was believed"


def _sent(source: Source, message: bytes) -> bytes:
    kind = source.below(4)
    if kind == 0:
        return source.take(source.below(400))
    return message if kind == 1 else changed(source, message)
