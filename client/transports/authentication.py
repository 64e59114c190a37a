"""A host proving who it is on a queue, and having the target prove itself (Base §8.13.5), whatever the wire."""

from __future__ import annotations

from contextlib import suppress

from forebay.client.transports.queues import IoQueue
from forebay.errors import ConnectionLost, ForebayError, TargetRefused
from forebay.ids import HostIdentity
from forebay.nvmetcp import command as nvme
from forebay.nvmetcp.authentication import MAX_MESSAGE_BYTES, AuthenticationFailed, HostAuthentication, Step

__all__ = ["authenticate"]


def authenticate(
    queue: IoQueue, host: HostIdentity, subsystem_nqn: str, transaction: int, deadline_ms: int, *, asked: bool
) -> None:
    """Do what a target ``asked`` for in its answer to Connect, which came on ``queue`` just before.

    A host that knows how the target proves itself takes none that does not. Raises `AuthenticationFailed`,
    `TargetRefused`, and what the queue does.
    """
    secrets = host.secrets
    if not asked:
        if secrets is not None and secrets.controller is not None:
            raise TargetRefused("the target does not authenticate, though this host has a secret of it")
        return
    if secrets is None:
        raise TargetRefused("the target wants in-band authentication, and this host has no secret")
    proof = HostAuthentication(secrets, host.nqn, subsystem_nqn, transaction, groups=secrets.groups)
    message: bytes | None = proof.start()
    try:
        while message is not None:
            queue.execute(nvme.authentication_send(0, len(message)), deadline_ms, data=message)
            if proof.step is Step.AUTHENTICATED:
                return
            receive = nvme.authentication_receive(0, MAX_MESSAGE_BYTES)
            message = proof.received(bytes(queue.execute(receive, deadline_ms, read_bytes=MAX_MESSAGE_BYTES)[1]))
    except AuthenticationFailed as failed:
        if failed.answer is not None:
            with suppress(ForebayError):  # a courtesy; what failed is worth more than that it could not be said
                send = nvme.authentication_send(0, len(failed.answer))
                queue.execute(send, deadline_ms, data=failed.answer)
        raise
    except ConnectionLost as lost:
        # Linux's target closes as soon as it has said no, and its word may not come through before that.
        raise ConnectionLost(
            f"the connection ended in the authentication; it may be that the target does not take this host's secret: "
            f"{lost.message}"
        ) from lost
