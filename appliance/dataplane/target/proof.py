"""A queue's host proving who it is: Authentication Send and Receive (Base §6.1, §6.2) around the pure transaction."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from forebay.appliance.dataplane.target.stream import NotProven
from forebay.nvmetcp import spec
from forebay.nvmetcp.authentication import (
    ALL_HASHES,
    MAX_MESSAGE_BYTES,
    ControllerAuthentication,
    Step,
)
from forebay.nvmetcp.command import Command
from forebay.nvmetcp.secret import HostSecrets
from forebay.nvmetcp.spec import DNR, DhchapHash, DhGroup, FabricsType, Status

if TYPE_CHECKING:
    from forebay.appliance.dataplane.target.queue import Queue

__all__ = ["Proof", "ProofTerms", "is_proof"]

log = logging.getLogger(__name__)

_INVALID_FIELD: Final = Status.INVALID_FIELD | DNR


@dataclass(frozen=True, slots=True)
class ProofTerms:
    """Hashes and groups that this end takes, the first choice first.

    The null group is the first: secrets are random keys of 256 bits and more, of which who listens learns nothing, and
    nothing is encrypted by what is exchanged. The two largest groups are to be asked for: an exponentiation in them
    holds the interpreter for up to 55 ms, at the wish of a host that has proven nothing yet.
    """

    hashes: tuple[DhchapHash, ...] = ALL_HASHES
    groups: tuple[DhGroup, ...] = (DhGroup.NULL, DhGroup.FFDHE2048, DhGroup.FFDHE3072, DhGroup.FFDHE4096)


def is_proof(command: Command) -> bool:
    """Whether this is Authentication Send or Receive."""
    return command.opcode == spec.FABRICS_OPCODE and command.fabrics_type in (
        FabricsType.AUTHENTICATION_SEND,
        FabricsType.AUTHENTICATION_RECEIVE,
    )


class Proof:
    """What stands between the Connect of one queue and its commands. Used by the queue's thread alone."""

    def __init__(self, queue: Queue, secrets: HostSecrets, names: tuple[str, str], terms: ProofTerms) -> None:
        """``names`` are the NQNs of the host and of the subsystem."""
        self.given = False
        """The host has proven who it is."""
        self.agreed: tuple[DhchapHash, DhGroup] | None = None
        """Hash and group of the last proof."""
        self._queue = queue
        self._secrets = secrets
        self._names = names
        self._terms = terms
        self._transaction = self._new()

    def _new(self) -> ControllerAuthentication:
        host, subsystem = self._names
        return ControllerAuthentication(
            self._secrets, host, subsystem, hashes=self._terms.hashes, groups=self._terms.groups
        )

    def send(self, command: Command, message: bytes) -> None:
        """Authentication Send, with what it brought. Raises `NotProven` where the host gave up."""
        if command.cdw10 != spec.AUTHENTICATION_PROTOCOL or command.cdw11 != len(message):
            self._queue.respond(command, _INVALID_FIELD)
            return
        if self._transaction.step is Step.AUTHENTICATED:
            self._transaction = self._new()  # a host may prove itself again whenever it likes
        self._transaction.received(message)
        self._queue.respond(command, Status.SUCCESS)
        self._look()

    def receive(self, command: Command) -> None:
        """Authentication Receive. Raises `NotProven` when the host was told that its proof does not hold."""
        message = self._transaction.due
        room_bytes = min(command.cdw11, command.sgl_length_bytes)
        if command.cdw10 != spec.AUTHENTICATION_PROTOCOL or command.cdw11 > command.sgl_length_bytes:
            self._queue.respond(command, _INVALID_FIELD)
        elif message is None:
            self._queue.respond(command, Status.COMMAND_SEQUENCE_ERROR | DNR)
        elif room_bytes < len(message):
            self._queue.respond(command, _INVALID_FIELD)
        else:
            self._transaction.delivered()
            self._queue.send_data(command.cid, message.ljust(min(room_bytes, MAX_MESSAGE_BYTES), b"\0"))
            self._look()

    def _look(self) -> None:
        step, (host, subsystem) = self._transaction.step, self._names
        if step is Step.AUTHENTICATED:
            self.agreed = self._transaction.agreed
            if not self.given:
                self.given = True
                self._queue.proven()
        elif step is Step.FAILED:
            why = self._transaction.why
            log.warning("%s: host %s is not authenticated in %s: %s", self._queue.peer, host, subsystem, why)
            raise NotProven("the host did not prove who it is")
