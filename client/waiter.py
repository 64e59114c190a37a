"""Waiting for blocks that another writer is about to make visible."""

from __future__ import annotations

from collections.abc import Sequence

from forebay.client.session import Session
from forebay.errors import DeadlineExceeded, ForebayError, InvalidArgument, ProtocolError
from forebay.ids import BlockKey
from forebay.proto import forebay_pb2 as pb
from forebay.proto.columns import keys_to_proto, unpack

__all__ = ["wait_visible"]


def wait_visible(session: Session, keys: Sequence[BlockKey], deadline_ms: int, pending_only: bool) -> list[int]:
    """Wait until each key is visible, its producer is gone, or the deadline is here; one code a key.

    ``pending_only``: a key that has no producer now is not waited for.
    """
    codes: list[int | None] = [None] * len(keys)
    rest = DeadlineExceeded.code
    view = session.view
    try:
        context = view.context(session.rpc.left_ms(deadline_ms))
        request = pb.WaitRequest(context=context, keys=keys_to_proto(keys), pending_only=pending_only)
        for reply in session.rpc.stream(session.rpc.blocks.Wait, request, deadline_ms):
            rows = unpack("u32", reply.indices, "indices")
            for row, code in zip(rows, unpack("u16", reply.status, "status", len(rows)), strict=True):
                if row < len(codes):
                    codes[row] = code
            if None not in codes:
                break
    except InvalidArgument as e:
        rest = e.code if e.code != InvalidArgument.code else ProtocolError.code
    except ForebayError as e:
        rest = e.code
    return [rest if code is None else code for code in codes]
