"""Hints and descriptions as the protocol carries them."""

from __future__ import annotations

from forebay.client.results import Describe, Hints
from forebay.errors import InvalidArgument
from forebay.ids import BlockKey
from forebay.proto import forebay_pb2 as pb
from forebay.proto.columns import keys_to_proto, pack

__all__ = ["check_describe", "describe_to_proto", "hints_to_proto"]


def hints_to_proto(hints: Hints | None) -> pb.Hints | None:
    """Hints as a message. Raises `InvalidArgument` for a number out of range."""
    if hints is None:
        return None
    try:
        return pb.Hints(
            priority_class=hints.priority_class,
            session=hints.session,
            parent_session=hints.parent_session,
            final=hints.final,
            reuse_after_ms=hints.reuse_after_ms,
            retain_until_unix_ms=hints.retain_until_unix_ms,
            expected_reuse=hints.expected_reuse,
            deadline_ms=hints.deadline_ms,
            origin=hints.origin,
        )
    except (ValueError, TypeError) as e:
        raise InvalidArgument(f"hints: {e}", field="hints") from e


def check_describe(describe: Describe | None, count: int) -> None:
    """Refuse a description of ``count`` blocks that lacks rows. Raises `InvalidArgument`."""
    if describe is None:
        return
    for name, rows in (("parents", describe.parents), ("token_hashes", describe.token_hashes)):
        if len(rows) not in (0, count):
            field = f"describe.{name}"
            raise InvalidArgument(f"{field} has {len(rows)} rows for {count} keys", field=field, limit=count)


def describe_to_proto(describe: Describe | None, part: slice) -> pb.Describe | None:
    """The rows ``part`` of a description."""
    if describe is None:
        return None
    message = pb.Describe(block_tokens=describe.block_tokens, adapter=describe.adapter)
    if describe.parents:
        message.parents.CopyFrom(keys_to_proto([BlockKey(parent) for parent in describe.parents[part]]))
    if describe.token_hashes:
        message.token_hashes = pack("u64", describe.token_hashes[part])
    return message
