"""The error tree: codes and their statuses in each protocol."""

import pytest

from forebay.errors import (
    BY_CODE,
    GRPC_STATUS,
    HTTP_STATUS,
    Busy,
    ForebayError,
    NamespaceNotFound,
    NotFound,
    TargetRefused,
    WriteFenced,
    http_status,
)


@pytest.mark.parametrize("table", [GRPC_STATUS, HTTP_STATUS])
def test_every_error_has_a_status(table: dict[type[ForebayError], object]) -> None:
    for cls in BY_CODE.values():
        assert any(base in table for base in cls.__mro__)
    assert set(table) <= set(BY_CODE.values())


def test_the_nearest_class_decides() -> None:
    assert http_status(NamespaceNotFound()) == http_status(NotFound()) == 404
    assert http_status(WriteFenced()) == HTTP_STATUS[TargetRefused]
    assert http_status(Busy()) == 429


def test_http_statuses_are_errors() -> None:
    for cls in BY_CODE.values():
        status = http_status(cls())
        assert 400 <= status < 600
        if cls.retriable:  # a proxy or a client that retries by status must not give up
            assert status in (409, 429, 502, 503, 504)
