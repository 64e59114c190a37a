import json

import grpc
import pytest

from forebay import errors
from forebay.errors import BY_CODE, GRPC_STATUS, OK, ForebayError, from_code, reason

GOLDEN = {
    1: "forebay_error",
    1000: "invalid_argument",
    1001: "key_size",
    1002: "value_size",
    1003: "duplicate_key",
    1004: "schema_invalid",
    1005: "grid_invalid",
    1006: "config_invalid",
    2001: "unauthenticated",
    2002: "permission_denied",
    2003: "not_found",
    2004: "namespace_not_found",
    2005: "already_exists",
    3101: "session_expired",
    3102: "lease_expired",
    3103: "stale_incarnation",
    3104: "stale_generation",
    3105: "stale_map",
    3106: "write_expired",
    4001: "no_space",
    4002: "quota_exceeded",
    4003: "busy",
    5001: "absent",
    5002: "pending",
    5003: "checksum_mismatch",
    5004: "other_keyspace",
    5005: "other_generation",
    5006: "evicted",
    6001: "unavailable",
    6002: "deadline_exceeded",
    6003: "data_dir_in_use",
    6004: "data_dir_newer",
    6005: "capacity_short",
    6006: "volume_mismatch",
    6007: "metadata_corrupt",
    7001: "protocol_error",
    7002: "connection_lost",
    7003: "target_refused",
    7004: "write_fenced",
    7005: "target_failed",
}
"""Codes travel and are stored by others: a line here may be added, never changed or given to another error."""

CLASSES = [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, ForebayError)]


def test_codes_are_what_they_always_were() -> None:
    assert {code: reason(code) for code in BY_CODE} == GOLDEN


def test_codes_are_unique_and_fit_a_status_column() -> None:
    codes = [c.code for c in CLASSES]
    assert len(set(codes)) == len(codes) == len(BY_CODE)
    assert all(0 < code < 1 << 16 for code in codes)
    assert all("code" in vars(c) for c in CLASSES), "a class without a code of its own would share its parent's"


@pytest.mark.parametrize("cls", CLASSES, ids=lambda c: c.__name__)
def test_each_error_has_a_grpc_status_and_survives_the_wire(cls: type[ForebayError]) -> None:
    status = next(GRPC_STATUS[c] for c in cls.__mro__ if c in GRPC_STATUS)
    assert grpc.StatusCode[status]
    error = cls("what", field="a.b", limit=7, retry_after_ms=5)
    sent = json.loads(json.dumps(error.to_dict()))
    got = from_code(
        sent["code"], sent["message"], field=sent["field"], limit=sent["limit"], retry_after_ms=sent["retry_after_ms"]
    )
    assert type(got) is cls and got.to_dict() == error.to_dict()
    assert str(got) == f"what field=a.b limit=7 [{cls.__name__} {cls.code}]"


@pytest.mark.parametrize("cls", CLASSES, ids=lambda c: c.__name__)
def test_each_error_says_something_without_being_told(cls: type[ForebayError]) -> None:
    assert cls().message


def test_reasons() -> None:
    assert (reason(OK), reason(9999)) == ("ok", "code_9999")
    unknown = from_code(9999)
    assert type(unknown) is ForebayError and "9999" in str(unknown)


def test_a_subclass_takes_the_nearest_status() -> None:
    def status(cls: type[ForebayError]) -> str:
        return next(GRPC_STATUS[c] for c in cls.__mro__ if c in GRPC_STATUS)

    assert status(errors.KeySize) == "INVALID_ARGUMENT"
    assert status(errors.NamespaceNotFound) == "NOT_FOUND"
    assert status(errors.TargetFailed) == "INTERNAL"
