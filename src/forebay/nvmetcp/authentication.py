"""DH-HMAC-CHAP, the in-band authentication of NVMe (Base §8.13.5): both ends as state machines over messages.

Nothing here touches a queue. A host `start`s, and gives each message that it received to `received`, which answers the
one to send next. A controller is given what Authentication Send brought (`received`), and has what the next
Authentication Receive gets in `due`. Each end checks every field of what a peer sent before it uses it. Either is for
one transaction: to authenticate again takes a new one. The transcript, C and S being challenge and sequence number:

    host                                       controller
    AUTH_Negotiate: hashes, groups    -->
                                      <--      DH-HMAC-CHAP_Challenge: hash, group, S1, C1, g^x
    DH-HMAC-CHAP_Reply: R1,
      and to have the other proven S2, C2, g^y -->
                                      <--      DH-HMAC-CHAP_Success1: R2 if asked for
    DH-HMAC-CHAP_Success2 (if R2 was) -->

What goes wrong is told by Failure1 (controller) or Failure2 (host), and ends the connection.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import struct
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Final

from forebay.errors import TargetRefused
from forebay.nvmetcp import spec
from forebay.nvmetcp.groups import Exchange, public_bytes
from forebay.nvmetcp.secret import HASH_NAMES, HostSecrets, digest_bytes
from forebay.nvmetcp.spec import AuthenticationFailure, AuthenticationMessage, AuthenticationType, DhchapHash, DhGroup

__all__ = [
    "ALL_GROUPS",
    "ALL_HASHES",
    "MAX_MESSAGE_BYTES",
    "TRANSITIONS",
    "AuthenticationFailed",
    "ControllerAuthentication",
    "HostAuthentication",
    "Step",
    "state_diagram",
]

ALL_HASHES: Final = tuple(DhchapHash)
ALL_GROUPS: Final = tuple(DhGroup)
MAX_MESSAGE_BYTES: Final = 4096
"""No message is longer: the longest, a reply with a value of ffdhe8192, has 1,168 bytes."""
_FAILED: Final = 0x01
"""Reason code of failures. Base §8.13.5.7."""
_HOST, _CONTROLLER = b"HostHost", b"Controller"
_CUT_SHORT: Final = AuthenticationFailure.INCORRECT_PAYLOAD

Random = Callable[[int], bytes]


class Step(Enum):
    """Where a transaction is: what comes next."""

    NEGOTIATE = "negotiate"
    CHALLENGE = "challenge"
    REPLY = "reply"
    SUCCESS1 = "success1"
    SUCCESS2 = "success2"
    FAILURE = "failure"
    """A failure message is what the peer gets."""
    AUTHENTICATED = "authenticated"
    FAILED = "failed"


TRANSITIONS: Final = {
    Step.NEGOTIATE: {"negotiate": Step.CHALLENGE, "wrong": Step.FAILURE},
    Step.CHALLENGE: {"challenge": Step.REPLY, "wrong": Step.FAILURE, "failure1": Step.FAILED},
    Step.REPLY: {"reply": Step.SUCCESS1, "wrong": Step.FAILURE, "failure2": Step.FAILED},
    Step.SUCCESS1: {
        "success1": Step.AUTHENTICATED,
        "success1 with a response": Step.SUCCESS2,
        "wrong": Step.FAILURE,
        "failure1": Step.FAILED,
    },
    Step.SUCCESS2: {"success2": Step.AUTHENTICATED, "wrong": Step.FAILURE, "failure2": Step.FAILED},
    Step.FAILURE: {"failure": Step.FAILED, "wrong": Step.FAILURE},
    Step.AUTHENTICATED: {},
    Step.FAILED: {},
}
"""Of both ends: a step of a message is left when it was sent, or came; docs/nvmetcp-states.md shows them."""


class AuthenticationFailed(TargetRefused):
    """The target did not take the host's proof, or gave none that holds; ``answer`` is what to send it, if anything."""

    def __init__(self, text: str, answer: bytes | None = None) -> None:
        super().__init__(text)
        self.answer = answer


class _Wrong(Exception):
    """A message of the peer that ends the transaction."""

    def __init__(self, explanation: AuthenticationFailure) -> None:
        super().__init__(explanation.name.lower().replace("_", " "))
        self.explanation = explanation


def _fields(layout: struct.Struct, message: bytes, kind: AuthenticationMessage, transaction: int | None) -> list[int]:
    """The integers after the header of a message that must be ``kind``. Raises `_Wrong`."""
    if len(message) < spec.AUTHENTICATION_HEADER.size:
        raise _Wrong(_CUT_SHORT)
    about = AuthenticationType.COMMON if kind is AuthenticationMessage.NEGOTIATE else AuthenticationType.DHCHAP
    auth_type, auth_id, t_id = spec.AUTHENTICATION_HEADER.unpack_from(message)
    if (auth_type, auth_id) != (about, kind):
        raise _Wrong(AuthenticationFailure.INCORRECT_MESSAGE)
    if len(message) < layout.size or (transaction is not None and t_id != transaction):
        raise _Wrong(_CUT_SHORT)
    return list(layout.unpack_from(message)[3:])


def _failure_in(message: bytes, kind: AuthenticationMessage) -> int | None:
    """The explanation in a failure message, None if it is no such message."""
    if len(message) < spec.AUTH_FAILURE.size:
        return None
    auth_type, auth_id, _, _, explanation = spec.AUTH_FAILURE.unpack_from(message)
    return int(explanation) if (auth_type, auth_id) == (AuthenticationType.COMMON, kind) else None


def _failure(kind: AuthenticationMessage, transaction: int, explanation: AuthenticationFailure) -> bytes:
    return spec.AUTH_FAILURE.pack(AuthenticationType.COMMON, kind, transaction, _FAILED, explanation)


class _Transcript:
    """What both ends share: the names, what was agreed on, and the step."""

    def __init__(self, secrets: HostSecrets, host_nqn: str, subsystem_nqn: str, random: Random) -> None:
        self.step = Step.NEGOTIATE
        self._secrets = secrets
        self._host, self._subsystem = host_nqn, subsystem_nqn
        self._random = random
        self._transaction = 0
        self._hash = DhchapHash.SHA256
        self._group = DhGroup.NULL
        self._shared = b""

    @property
    def agreed(self) -> tuple[DhchapHash, DhGroup]:
        """The hash and the group of this transaction, once there was a challenge."""
        return self._hash, self._group

    def _move(self, cause: str) -> None:
        self.step = TRANSITIONS[self.step][cause]

    def _sequence(self) -> int:
        return int.from_bytes(self._random(4), "little") or 1  # 0 would say that there is none

    def _value(self, message: bytes, at: int, value_bytes: int) -> bytes:
        """The peer's public value, as long as the group has it. Raises `_Wrong`."""
        if value_bytes != public_bytes(self._group) or len(message) < at + value_bytes:
            raise _Wrong(_CUT_SHORT)
        return message[at : at + value_bytes]

    def _share(self, exchange: Exchange, value: bytes) -> None:
        """Agree on a secret by the peer's public value. Raises `_Wrong`."""
        shared = exchange.shared(value)
        if shared is None:
            raise _Wrong(AuthenticationFailure.GROUP_NOT_USABLE)
        self._shared = shared

    def _response(self, key: bytes, challenge: bytes, sequence: int, names: bytes) -> bytes:
        """The HMAC over the challenge, augmented by what was agreed on, and who proves what. Base §8.13.5.4."""
        name = HASH_NAMES[self._hash]
        if self._shared:
            challenge = hmac.digest(hashlib.new(name, self._shared).digest(), challenge, name)
        # SC_C is 0: no secure channel follows.
        return hmac.digest(key, challenge + struct.pack("<IHB", sequence, self._transaction, 0) + names, name)

    def _host_response(self, challenge: bytes, sequence: int) -> bytes:
        names = _HOST + self._host.encode() + b"\0" + self._subsystem.encode()
        return self._response(self._secrets.host.bound_to(self._host), challenge, sequence, names)

    def _controller_response(self, challenge: bytes, sequence: int) -> bytes:
        secret = self._secrets.controller
        if secret is None:
            raise _Wrong(AuthenticationFailure.FAILED)  # there is nothing by which to prove it
        names = _CONTROLLER + self._subsystem.encode() + b"\0" + self._host.encode()
        return self._response(secret.bound_to(self._subsystem), challenge, sequence, names)


class HostAuthentication(_Transcript):
    """The host's end of one transaction."""

    def __init__(
        self,
        secrets: HostSecrets,
        host_nqn: str,
        subsystem_nqn: str,
        transaction: int,
        *,
        hashes: Sequence[DhchapHash] = ALL_HASHES,
        groups: Sequence[DhGroup] = ALL_GROUPS,
        random: Random = os.urandom,
    ) -> None:
        super().__init__(secrets, host_nqn, subsystem_nqn, random)
        self._transaction = transaction & 0xFFFF
        self._hashes, self._groups = tuple(hashes), tuple(groups)
        self._challenge, self._sent_sequence = b"", 0

    def start(self) -> bytes:
        """AUTH_Negotiate. Base §8.13.5.2."""
        self._move("negotiate")
        return spec.AUTH_NEGOTIATE.pack(
            AuthenticationType.COMMON, AuthenticationMessage.NEGOTIATE, self._transaction, 0, 1
        ) + spec.DHCHAP_DESCRIPTOR.pack(
            AuthenticationType.DHCHAP, len(self._hashes), len(self._groups), bytes(self._hashes), bytes(self._groups)
        )

    def received(self, message: bytes) -> bytes | None:
        """The message to send after this one; None when there is none. Raises `AuthenticationFailed`."""
        assert self.step in (Step.CHALLENGE, Step.SUCCESS1), f"nothing was asked for: {self.step}"
        try:
            told = _failure_in(message, AuthenticationMessage.FAILURE1)
            if told is not None and "failure1" in TRANSITIONS[self.step]:
                self._move("failure1")
                raise AuthenticationFailed(f"the target does not take this host's secret (explanation {told:02x}h)")
            if self.step is Step.CHALLENGE:
                return self._challenged(message)
            return self._succeeded(message)
        except _Wrong as wrong:
            self._move("wrong")
            self._move("failure")
            failure = _failure(AuthenticationMessage.FAILURE2, self._transaction, wrong.explanation)
            raise AuthenticationFailed(f"the target does not prove who it is: {wrong}", failure) from None

    def _challenged(self, message: bytes) -> bytes:
        layout = spec.DHCHAP_CHALLENGE
        length, hash_id, group_id, value_bytes, sequence = _fields(
            layout, message, AuthenticationMessage.CHALLENGE, self._transaction
        )
        if hash_id not in self._hashes:
            raise _Wrong(AuthenticationFailure.HASH_NOT_USABLE)
        if group_id not in self._groups:
            raise _Wrong(AuthenticationFailure.GROUP_NOT_USABLE)
        self._hash, self._group = DhchapHash(hash_id), DhGroup(group_id)
        value_at = layout.size + length
        if length != digest_bytes(self._hash):
            raise _Wrong(_CUT_SHORT)
        value = self._value(message, value_at, value_bytes)
        challenge, mine = message[layout.size : value_at], b""
        if self._group is not DhGroup.NULL:
            exchange = Exchange(self._group, self._random)
            self._share(exchange, value)
            mine = exchange.public
        response = self._host_response(challenge, sequence)
        proves = self._secrets.controller is not None
        if proves:
            self._challenge, self._sent_sequence = self._random(length), self._sequence()
        self._move("challenge")
        self._move("reply")
        return (
            spec.DHCHAP_REPLY.pack(
                AuthenticationType.DHCHAP,
                AuthenticationMessage.REPLY,
                self._transaction,
                length,
                int(proves),
                len(mine),
                self._sent_sequence,
            )
            + response
            + (self._challenge or bytes(length))
            + mine
        )

    def _succeeded(self, message: bytes) -> bytes | None:
        layout = spec.DHCHAP_SUCCESS1
        length, valid = _fields(layout, message, AuthenticationMessage.SUCCESS1, self._transaction)
        if self._secrets.controller is None:
            self._move("success1")
            return None
        response = message[layout.size : layout.size + length]
        wanted = self._controller_response(self._challenge, self._sent_sequence)
        if not valid or not hmac.compare_digest(response, wanted):
            raise _Wrong(AuthenticationFailure.FAILED)
        self._move("success1 with a response")
        self._move("success2")
        return spec.DHCHAP_SUCCESS2.pack(AuthenticationType.DHCHAP, AuthenticationMessage.SUCCESS2, self._transaction)


class ControllerAuthentication(_Transcript):
    """The controller's end of one transaction. It takes the first of its hashes and groups that the host lists."""

    def __init__(
        self,
        secrets: HostSecrets,
        host_nqn: str,
        subsystem_nqn: str,
        *,
        hashes: Sequence[DhchapHash] = ALL_HASHES,
        groups: Sequence[DhGroup] = ALL_GROUPS,
        random: Random = os.urandom,
    ) -> None:
        super().__init__(secrets, host_nqn, subsystem_nqn, random)
        self._hashes, self._groups = tuple(hashes), tuple(groups)
        self._exchange: Exchange | None = None
        self._challenge = b""
        self._sent_sequence = 0
        self._answer = b""
        self.why = ""
        """What went wrong, for the log."""

    def received(self, message: bytes) -> None:
        """Authentication Send brought this. What is wrong with it is what `due` answers."""
        assert self.step not in (Step.AUTHENTICATED, Step.FAILED), f"a message after the end: {self.step}"
        try:
            told = _failure_in(message, AuthenticationMessage.FAILURE2)
            if told is not None and "failure2" in TRANSITIONS[self.step]:
                self.why = f"the host does not take the controller's proof (explanation {told:02x}h)"
                self._move("failure2")
            elif self.step is Step.NEGOTIATE:
                self._negotiate(message)
            elif self.step is Step.REPLY:
                self._replied(message)
            elif self.step is Step.SUCCESS2:
                _fields(spec.DHCHAP_SUCCESS2, message, AuthenticationMessage.SUCCESS2, self._transaction)
                self._move("success2")
            else:
                raise _Wrong(AuthenticationFailure.INCORRECT_MESSAGE)
        except _Wrong as wrong:
            self.why = str(wrong)
            self._move("wrong")
            self._answer = _failure(AuthenticationMessage.FAILURE1, self._transaction, wrong.explanation)

    @property
    def due(self) -> bytes | None:
        """The message that the host may fetch now, None if it is the host's turn; `delivered` when it has it."""
        if self.step in (Step.CHALLENGE, Step.SUCCESS1, Step.FAILURE):
            return self._answer
        return None

    def delivered(self) -> None:
        """The host fetched what was due."""
        if self.step is Step.CHALLENGE:
            self._move("challenge")
        elif self.step is Step.FAILURE:
            self._move("failure")
        else:
            proves = bool(spec.DHCHAP_SUCCESS1.unpack_from(self._answer)[-1])
            self._move("success1 with a response" if proves else "success1")

    def _negotiate(self, message: bytes) -> None:
        layout, descriptor = spec.AUTH_NEGOTIATE, spec.DHCHAP_DESCRIPTOR
        channel, count = _fields(layout, message, AuthenticationMessage.NEGOTIATE, None)
        self._transaction = spec.AUTHENTICATION_HEADER.unpack_from(message)[2]
        if len(message) < layout.size + count * descriptor.size:
            raise _Wrong(_CUT_SHORT)
        if channel:
            raise _Wrong(AuthenticationFailure.SECURE_CHANNEL_MISMATCH)
        for at in range(layout.size, layout.size + count * descriptor.size, descriptor.size):
            kind, hash_count, group_count, hashes, groups = descriptor.unpack_from(message, at)
            if kind != AuthenticationType.DHCHAP:
                continue
            if hash_count > spec.DHCHAP_IDS or group_count > spec.DHCHAP_IDS:
                raise _Wrong(_CUT_SHORT)
            self._challenge_for(hashes[:hash_count], groups[:group_count])
            return
        raise _Wrong(AuthenticationFailure.PROTOCOL_NOT_USABLE)

    def _challenge_for(self, hashes: bytes, groups: bytes) -> None:
        hash_id = next((one for one in self._hashes if one in hashes), None)
        if hash_id is None:
            raise _Wrong(AuthenticationFailure.HASH_NOT_USABLE)
        group = next((one for one in self._groups if one in groups), None)
        if group is None:
            raise _Wrong(AuthenticationFailure.GROUP_NOT_USABLE)
        self._hash, self._group = hash_id, group
        self._challenge, self._sent_sequence = self._random(digest_bytes(hash_id)), self._sequence()
        self._exchange = Exchange(group, self._random) if group is not DhGroup.NULL else None
        public = self._exchange.public if self._exchange is not None else b""
        self._answer = (
            spec.DHCHAP_CHALLENGE.pack(
                AuthenticationType.DHCHAP,
                AuthenticationMessage.CHALLENGE,
                self._transaction,
                len(self._challenge),
                hash_id,
                group,
                len(public),
                self._sent_sequence,
            )
            + self._challenge
            + public
        )
        self._move("negotiate")

    def _replied(self, message: bytes) -> None:
        layout = spec.DHCHAP_REPLY
        length, asked, value_bytes, sequence = _fields(layout, message, AuthenticationMessage.REPLY, self._transaction)
        value_at = layout.size + 2 * length
        if length != len(self._challenge):
            raise _Wrong(_CUT_SHORT)
        value = self._value(message, value_at, value_bytes)
        if self._exchange is not None:
            self._share(self._exchange, value)
        response, challenge = message[layout.size : layout.size + length], message[layout.size + length : value_at]
        if not hmac.compare_digest(response, self._host_response(self._challenge, self._sent_sequence)):
            raise _Wrong(AuthenticationFailure.FAILED)
        proof = b""
        if asked:
            if challenge == self._challenge:  # what was asked of the host, sent back
                raise _Wrong(AuthenticationFailure.FAILED)
            proof = self._controller_response(challenge, sequence)
        self._answer = (
            spec.DHCHAP_SUCCESS1.pack(
                AuthenticationType.DHCHAP, AuthenticationMessage.SUCCESS1, self._transaction, length, int(bool(proof))
            )
            + proof
        )
        self._move("reply")


def state_diagram() -> str:
    """The table as a section of Markdown with a Mermaid diagram."""
    lines = ["## Authentication", "", "```mermaid", "stateDiagram-v2", f"    [*] --> {Step.NEGOTIATE.value}"]
    for step, row in TRANSITIONS.items():
        lines += [f"    {step.value} --> {target.value}: {cause}" for cause, target in row.items()]
    lines += [f"    {step.value} --> [*]" for step, row in TRANSITIONS.items() if not row]
    return "\n".join([*lines, "```"]) + "\n"
