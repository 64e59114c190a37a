import cbor2
import pytest

from forebay.appliance.namespace.cbor_map import load_map
from forebay.errors import MetadataCorrupt


def test_a_map_is_what_was_stored() -> None:
    assert load_map(cbor2.dumps({"v": 1, 2: b"x"}), "state") == {"v": 1, 2: b"x"}


@pytest.mark.parametrize(
    "data",
    [b"", b"\xff", b"\x81" * 60_000 + b"\x80", cbor2.dumps([1]), cbor2.dumps(7), b"\xa1\xf6", b"\x7f\x61\xff\xff"],
    ids=["nothing", "break", "deep", "list", "number", "cut", "not UTF-8"],
)
def test_anything_else_is_corrupt_metadata(data: bytes) -> None:
    with pytest.raises(MetadataCorrupt) as caught:
        load_map(data, "state record 'x'")
    assert caught.value.field == "state record 'x'"
