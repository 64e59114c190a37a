"""Log lines of the daemon and of the target, and the request id that joins them."""

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from forebay import request_id
from forebay.appliance import log
from forebay.errors import InvalidArgument
from tests.appliance.http.conftest import NodeMaker, eventually


@pytest.fixture
def file(tmp_path: Path, root_log: logging.Logger) -> Iterator[Path]:
    """Where the log goes."""
    yield tmp_path / "log"
    request_id.follow("")


def test_text_lines_name_the_request_and_the_fields(file: Path) -> None:
    log.set_up("info", "text", file)
    logging.getLogger("a").info("before")
    request_id.bind("req-1")
    logging.getLogger("a").info("said %s", "this", extra=log.fields(code=4, ms=1.5))
    logging.getLogger("a").debug("not heard")
    before, during = file.read_text().splitlines()
    assert before.endswith(" INFO    a: before")
    assert during.endswith(" INFO    a: said this request_id=req-1 code=4 ms=1.5")


def test_a_client_that_goes_away_while_it_is_answered_is_no_error_with_a_traceback(file: Path) -> None:
    log.set_up("info", "text", file)
    grpc_log = logging.getLogger("grpc._cython.cygrpc")
    for kind in ("ExecuteBatchError", "RuntimeError"):
        try:
            raise type(kind, (Exception,), {})()
        except Exception:
            grpc_log.exception("raised in core by servicer method %s", kind)
    assert "ExecuteBatchError" not in file.read_text() and "RuntimeError" in file.read_text()


def test_words_that_are_no_utf8_reach_the_file(file: Path) -> None:
    log.set_up("info", "text", file)
    logging.getLogger("a").warning("path %s", "\udcff")
    assert "path \\udcff" in file.read_text()


def test_a_peer_cannot_write_lines_of_its_own(file: Path) -> None:
    log.set_up("info", "text", file)
    logging.getLogger("a").warning("client %s", "x\n2026-01-01 ERROR forged\x1b[2J")
    assert file.read_text().count("\n") == 1
    assert "x\\n2026-01-01 ERROR forged\\x1b[2J" in file.read_text()


def test_json_lines_are_objects(file: Path) -> None:
    log.set_up("debug", "json", file)
    request_id.bind("req-2")
    try:
        raise ValueError("boom")
    except ValueError:
        logging.getLogger("b").exception("it failed", extra=log.fields(method="Put"))
    line = json.loads(file.read_text())
    assert line.pop("time") > 0 and "ValueError: boom" in line.pop("exception")
    assert line == {
        "level": "error",
        "logger": "b",
        "message": "it failed",
        "request_id": "req-2",
        "method": "Put",
    }


@pytest.mark.parametrize("given", ["", "two words", "x" * 65, "new\nline", "ümlaut"])
def test_an_id_that_does_not_fit_into_a_log_is_replaced(given: str) -> None:
    request_id.bind(given)
    made = request_id.current()
    assert made != given and len(made) == 16
    request_id.follow(given)
    assert request_id.current() == ""


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_request_is_found_in_the_log_of_the_daemon_and_of_the_target(start: NodeMaker, form: str) -> None:
    node = start(f'[log]\nlevel = "debug"\nformat = "{form}"\n')
    with node.connect() as client, request_id.request("put-by-hand"):
        assert client.put([b"key"], [b"value"])[0].stored
    target_log = node.data / "run" / "target.log"
    eventually(lambda: "put-by-hand" in node.log.read_text(), "the daemon's log")
    eventually(lambda: "put-by-hand" in target_log.read_text(), "the target's log")
    if form == "json":
        assert {"Allocate", "Commit"} <= of_request("put-by-hand", node.log)
        assert {"forebay_grants_add: done", "forebay_seal: done"} <= of_request("put-by-hand", target_log)


def of_request(ident: str, file: Path) -> set[str]:
    """Messages of one request in a JSON log; what the daemon prints is no log line."""
    lines = [json.loads(line) for line in file.read_text().splitlines() if line.startswith("{")]
    return {line["message"] for line in lines if line.get("request_id") == ident}


def test_what_is_done_inside_a_request_has_its_id() -> None:
    with request_id.request() as made:
        assert request_id.current() == made
        with request_id.request() as inner:
            assert inner == made
        with request_id.request("own") as inner:
            assert inner == request_id.current() == "own"
        assert request_id.current() == made
    assert request_id.current() == ""
    with pytest.raises(InvalidArgument), request_id.request("no good"):
        pass
