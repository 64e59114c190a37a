"""The one verdict that every read ends in (docs/design.md §5, read rule 5)."""

from forebay.client.reader import verdict
from forebay.client.transports.base import Outcome
from forebay.errors import OK, ChecksumMismatch, ConnectionLost, LeaseExpired

GOOD = Outcome(None, (11, None))


def test_good() -> None:
    assert verdict([GOOD, Outcome(None, (12,))], [(11, None), (12,)], 99, 100) == OK


def test_a_checksum_that_differs() -> None:
    assert verdict([GOOD, Outcome(None, (13,))], [(11, None), (12,)], 99, 100) == ChecksumMismatch.code


def test_a_checksum_that_is_missing() -> None:
    assert verdict([Outcome(None, (None,))], [(12,)], 99, 100) == ChecksumMismatch.code


def test_an_operation_that_failed() -> None:
    assert verdict([GOOD, Outcome(ConnectionLost(), (None,))], [(11, None), (12,)], 99, 100) == ConnectionLost.code


def test_a_lease_that_ran_out_comes_before_everything() -> None:
    """Bytes read after it may be another block's, so nothing about them matters."""
    assert verdict([GOOD], [(11, None)], 100, 100) == LeaseExpired.code
    assert verdict([Outcome(ConnectionLost(), (None,))], [(1,)], 101, 100) == LeaseExpired.code
