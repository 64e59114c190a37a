"""The connection's state machine as a table: `TRANSITIONS[role][state][input] -> state`.

What is not in the table is not allowed: received, it is a PDU Sequence Error (TCP §3.5); asked for locally, it is a
mistake of the caller. Run this module to print the diagram that `docs/nvmetcp-states.md` holds.
"""

from __future__ import annotations

from enum import Enum
from typing import Final

from forebay.nvmetcp.spec import PduType

__all__ = ["RECEIVE_INPUTS", "TRANSITIONS", "Input", "Role", "State", "state_diagram"]


class Role(Enum):
    """Which end of the connection this is."""

    HOST = "host"
    CONTROLLER = "controller"


class State(Enum):
    """States of a transport connection."""

    __hash__ = object.__hash__  # members are single objects; Enum's own hash is a Python call for every look-up

    NEW = "new"
    """Nothing was exchanged."""
    INITIALIZING = "initializing"
    """ICReq is under way: sent (host) or received and not answered (controller)."""
    READY = "ready"
    """The next byte received is the first of a PDU header."""
    PAYLOAD = "payload"
    """The next byte received is data of the PDU whose header was read."""
    DIGEST = "digest"
    """The next byte received is one of the digest of the data that was read."""
    TERMINATED = "terminated"
    """A termination PDU was sent or received; only closing is left."""
    CLOSED = "closed"
    """The peer's end of the byte stream was seen."""


class Input(Enum):
    """What moves a connection: a PDU header received, a PDU sent, payload complete, end of stream."""

    __hash__ = object.__hash__

    RECV_IC_REQ = "recv ICReq"
    RECV_IC_RESP = "recv ICResp"
    RECV_COMMAND = "recv CapsuleCmd"
    RECV_COMMAND_DATA = "recv CapsuleCmd with data"
    RECV_RESPONSE = "recv CapsuleResp"
    RECV_H2C_DATA = "recv H2CData"
    RECV_C2H_DATA = "recv C2HData"
    RECV_R2T = "recv R2T"
    RECV_TERM = "recv TermReq"
    PAYLOAD_COMPLETE = "payload complete"
    PAYLOAD_COMPLETE_DIGEST_DUE = "payload complete, digest due"
    DIGEST_COMPLETE = "digest complete"
    SEND_IC_REQ = "send ICReq"
    SEND_IC_RESP = "send ICResp"
    SEND_COMMAND = "send CapsuleCmd"
    SEND_RESPONSE = "send CapsuleResp"
    SEND_H2C_DATA = "send H2CData"
    SEND_C2H_DATA = "send C2HData"
    SEND_R2T = "send R2T"
    SEND_TERM = "send TermReq"
    END_OF_STREAM = "end of stream"


#: PDU types that each role may receive at all, and the input each one is.
RECEIVE_INPUTS: Final[dict[Role, dict[int, Input]]] = {
    Role.HOST: {
        PduType.IC_RESP: Input.RECV_IC_RESP,
        PduType.C2H_TERM_REQ: Input.RECV_TERM,
        PduType.CAPSULE_RESP: Input.RECV_RESPONSE,
        PduType.C2H_DATA: Input.RECV_C2H_DATA,
        PduType.R2T: Input.RECV_R2T,
    },
    Role.CONTROLLER: {
        PduType.IC_REQ: Input.RECV_IC_REQ,
        PduType.H2C_TERM_REQ: Input.RECV_TERM,
        PduType.CAPSULE_CMD: Input.RECV_COMMAND,
        PduType.H2C_DATA: Input.RECV_H2C_DATA,
    },
}

_ENDS: Final = {
    Input.RECV_TERM: State.TERMINATED,
    Input.SEND_TERM: State.TERMINATED,
    Input.END_OF_STREAM: State.CLOSED,
}
_TERMINATED: Final = {Input.END_OF_STREAM: State.CLOSED}
# While payload arrives no header can, but whatever may be sent in READY may be sent here too.
_PAYLOAD: Final = {
    Input.PAYLOAD_COMPLETE: State.READY,
    Input.PAYLOAD_COMPLETE_DIGEST_DUE: State.DIGEST,
    Input.SEND_TERM: State.TERMINATED,
    Input.END_OF_STREAM: State.CLOSED,
}
_DIGEST: Final = {
    Input.DIGEST_COMPLETE: State.READY,
    Input.SEND_TERM: State.TERMINATED,
    Input.END_OF_STREAM: State.CLOSED,
}

TRANSITIONS: Final[dict[Role, dict[State, dict[Input, State]]]] = {
    Role.HOST: {
        State.NEW: {Input.SEND_IC_REQ: State.INITIALIZING, Input.END_OF_STREAM: State.CLOSED},
        State.INITIALIZING: {Input.RECV_IC_RESP: State.READY, **_ENDS},
        State.READY: {
            Input.SEND_COMMAND: State.READY,
            Input.SEND_H2C_DATA: State.READY,
            Input.RECV_RESPONSE: State.READY,
            Input.RECV_R2T: State.READY,
            Input.RECV_C2H_DATA: State.PAYLOAD,
            **_ENDS,
        },
        State.PAYLOAD: {Input.SEND_COMMAND: State.PAYLOAD, Input.SEND_H2C_DATA: State.PAYLOAD, **_PAYLOAD},
        State.DIGEST: {Input.SEND_COMMAND: State.DIGEST, Input.SEND_H2C_DATA: State.DIGEST, **_DIGEST},
        State.TERMINATED: _TERMINATED,
        State.CLOSED: {},
    },
    Role.CONTROLLER: {
        State.NEW: {Input.RECV_IC_REQ: State.INITIALIZING, **_ENDS},
        State.INITIALIZING: {Input.SEND_IC_RESP: State.READY, **_ENDS},
        State.READY: {
            Input.RECV_COMMAND: State.READY,
            Input.RECV_COMMAND_DATA: State.PAYLOAD,
            Input.RECV_H2C_DATA: State.PAYLOAD,
            Input.SEND_RESPONSE: State.READY,
            Input.SEND_C2H_DATA: State.READY,
            Input.SEND_R2T: State.READY,
            **_ENDS,
        },
        State.PAYLOAD: {
            Input.SEND_RESPONSE: State.PAYLOAD,
            Input.SEND_C2H_DATA: State.PAYLOAD,
            Input.SEND_R2T: State.PAYLOAD,
            **_PAYLOAD,
        },
        State.DIGEST: {
            Input.SEND_RESPONSE: State.DIGEST,
            Input.SEND_C2H_DATA: State.DIGEST,
            Input.SEND_R2T: State.DIGEST,
            **_DIGEST,
        },
        State.TERMINATED: _TERMINATED,
        State.CLOSED: {},
    },
}


def state_diagram() -> str:
    """The table as a Markdown page with one Mermaid diagram for each role."""
    lines = [
        "# States of an NVMe/TCP connection",
        "",
        "Generated from the table in `src/forebay/nvmetcp/states.py`; do not edit. Renew it with",
        "`python -m forebay.nvmetcp.states > docs/nvmetcp-states.md`.",
    ]
    for role, table in TRANSITIONS.items():
        lines += ["", f"## {role.value.capitalize()}", "", "```mermaid", "stateDiagram-v2", "    [*] --> new"]
        for state, row in table.items():
            labels: dict[State, list[str]] = {}
            for cause, target in row.items():
                labels.setdefault(target, []).append(cause.value)
            lines += [f"    {state.value} --> {target.value}: {', '.join(causes)}" for target, causes in labels.items()]
        lines += [f"    {State.CLOSED.value} --> [*]", "```"]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    from forebay.nvmetcp import authentication

    print(state_diagram() + "\n" + authentication.state_diagram(), end="")
