"""The command line without a node: parsing, help, errors and exit codes."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from forebay.cli.context import Session
from forebay.cli.exits import ABSENT, OK, REFUSED, UNAVAILABLE, USAGE, WRONG_BYTES, error_of, exit_code, worst
from forebay.cli.keys import key_fields, parse_key, show_key
from forebay.cli.main import _one_line as said
from forebay.cli.main import cli, run
from forebay.cli.sizes import format_duration, format_size, format_time
from forebay.errors import (
    BY_CODE,
    Absent,
    ForebayError,
    InvalidArgument,
    KeySize,
    Unavailable,
    VolumeMismatch,
    reason,
)


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No node of this machine is found by accident."""
    for name in ("URL", "TOKEN", "NAMESPACE", "TRACE"):
        monkeypatch.delenv(f"FOREBAY_{name}", raising=False)
    monkeypatch.setenv("FOREBAY_DATA", str(tmp_path / "none"))


def commands(group: click.Group = cli, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, command in group.commands.items():
        yield (*path, name)
        if isinstance(command, click.Group):
            yield from commands(command, (*path, name))


@pytest.mark.parametrize("path", list(commands()), ids=" ".join)
def test_every_command_explains_itself(path: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*path, "--help"]) == OK
    text = capsys.readouterr().out
    assert "Usage: forebay " + " ".join(path) in text
    command: click.Command = cli
    for name in path:
        assert isinstance(command, click.Group)
        command = command.commands[name]
    if not isinstance(command, click.Group):
        assert "Example" in text and f"  forebay {' '.join(path)}" in text
        assert all(len(line) <= 100 for line in text.splitlines())
        assert "Exit codes:" in text and "See also:" in text
        for option in command.params:
            if isinstance(option, click.Option) and not option.is_flag and option.name != "token":
                told = (option.help or "").lower()
                assert option.show_default or "default" in told, (path, option.name)


def test_commands_that_list_or_report_have_json() -> None:
    # get writes the value itself; help and completion are text for a person and for a shell
    without = {"serve", "get", "namespace", "principal", "quarantine", "help", "completion"}
    for path in commands():
        command: click.Command = cli
        for name in path:
            assert isinstance(command, click.Group)
            command = command.commands[name]
        options = {option for parameter in command.params for option in parameter.opts}
        assert ("--json" in options) is (" ".join(path) not in without), path


def test_help_is_quick_because_it_loads_nothing_heavy() -> None:
    heavy = "{'numpy', 'grpc', 'rocksdict', 'rich', 'cbor2', 'google'}"
    code = (
        "import sys\nfrom forebay.cli.main import run\nsys.argv = ['forebay', '--help']\n"
        f"run()\nprint(sorted({heavy} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stderr.strip() == "[]"


@pytest.mark.parametrize(
    "argv",
    [
        ["nonsense"],
        ["put"],
        ["match"],
        ["ls", "--generation", "-1"],
        ["serve", "--capacity", "1 parsec"],
        ["namespace", "create", "a/b", "--durability", "hope"],
        ["namespace", "set", "a/b"],
        ["put", "", "-"],
        ["put", "k" * 1025, "-"],
        ["put", "--hex", "xyz", "-"],
        ["put", "key", "/no/such/file"],
        ["demo", "--block-size", "1KiB"],
        ["demo", "--trace", "/no/such/trace"],
    ],
    ids=" ".join,
)
def test_usage_errors(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(argv) == USAGE
    captured = capsys.readouterr()
    assert captured.out == "" and "Traceback" not in captured.err


@pytest.mark.parametrize("argv", [["ls"], ["status"], ["get", "k", "-"], ["principal", "ls"]], ids=" ".join)
def test_without_a_node(argv: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run(argv) == UNAVAILABLE
    (line,) = capsys.readouterr().err.splitlines()
    assert str(tmp_path / "none" / "node.json") in line and "forebay serve" in line and "Unavailable 6001" in line


def test_without_a_token(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run(["status", "--url", "forebay://127.0.0.1:1"]) == REFUSED
    (line,) = capsys.readouterr().err.splitlines()
    assert str(tmp_path / "none" / "admin.token") in line and "FOREBAY_TOKEN" in line


def test_a_directory_that_cannot_be_made_is_said(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert run(["demo", "--data", str(tmp_path / "file" / "below")]) == UNAVAILABLE
    (line,) = capsys.readouterr().err.splitlines()
    assert str(tmp_path / "file") in line


def test_debug_shows_the_traceback() -> None:
    with pytest.raises(ForebayError):
        run(["--debug", "status"])


def test_values_over_the_limit_are_refused_before_they_are_read(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    large = tmp_path / "large"
    with large.open("wb") as file:
        file.truncate((64 << 20) + 1)
    assert run(["put", "key", str(large)]) == USAGE
    (line,) = capsys.readouterr().err.splitlines()
    assert "has more than 64 MiB" in line and str(64 << 20) in line and "split it" in line


def test_closed_or_full_streams_are_said() -> None:
    command = f"{sys.executable} -m forebay.cli.main "
    for line, word in (("put x - <&-", "standard input is closed"), ("help keys > /dev/full", "No space left")):
        done = subprocess.run(["bash", "-c", command + line], capture_output=True, text=True, timeout=60)
        assert done.returncode == USAGE and word in done.stderr and len(done.stderr.splitlines()) == 1, done


@pytest.mark.usefixtures("root_log")  # a node that starts sends its log to standard error, here the captured one
def test_data_directories_that_cannot_be(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for data, word in (("/proc/nope", "cannot be made"), (str(tmp_path / "file"), "is no directory")):
        assert run(["serve", "--data", data]) == USAGE
        (line,) = capsys.readouterr().err.splitlines()
        assert data in line and word in line and "name" in line


def test_guesses_are_near(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["ls", "--quux"]) == USAGE
    assert "Did you mean" not in capsys.readouterr().err
    assert run(["ls", "--limmit", "1"]) == USAGE
    assert "'--limit'" in capsys.readouterr().err


def test_nothing_in_the_environment_is_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("FOREBAY_DATA", "")
    assert run(["status"]) == UNAVAILABLE
    assert str(tmp_path / ".local/share/forebay/node.json") in capsys.readouterr().err
    assert run(["serve", "--print-config"]) == OK
    assert f'data = "{tmp_path}/.local/share/forebay"' in capsys.readouterr().out


def test_empty_values_are_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    assert run(["put", "key", str(tmp_path / "empty")]) == USAGE
    assert "empty value" in capsys.readouterr().err


def test_options_may_stand_before_or_after_the_command(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FOREBAY_DATA", "/environment")
    for argv, where in (
        (["status"], "/environment"),
        (["--data", "/before", "status"], "/before"),
        (["status", "--data", "/after"], "/after"),
        (["--data", "/before", "status", "--data", "/after"], "/after"),
    ):
        assert run(argv) == UNAVAILABLE
        assert f"{where}/node.json" in capsys.readouterr().err, argv


def test_serve_prints_the_configuration_in_effect(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "forebay.toml"
    file.write_text('[grpc]\nlisten = "127.0.0.1:7000"\n')
    flags = ["--data", str(tmp_path / "d"), "--capacity", "1GiB"]
    assert run(["serve", "--config", str(file), "--print-config", *flags]) == OK
    text = capsys.readouterr().out
    assert 'listen = "127.0.0.1:7000"' in text and 'capacity = "1GiB"' in text and str(tmp_path / "d") in text
    file.write_text("[grpc]\nlissen = 1\n")
    assert run(["serve", "--config", str(file), "--print-config"]) == USAGE
    assert "listen" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("absent", ABSENT),
        ("namespace_not_found", ABSENT),
        ("key_size", USAGE),
        ("config_invalid", USAGE),
        ("unauthenticated", REFUSED),
        ("permission_denied", REFUSED),
        ("quota_exceeded", REFUSED),
        ("no_space", REFUSED),
        ("data_dir_in_use", REFUSED),
        ("write_fenced", REFUSED),
        ("unavailable", UNAVAILABLE),
        ("busy", UNAVAILABLE),
        ("deadline_exceeded", UNAVAILABLE),
        ("target_failed", UNAVAILABLE),
        ("checksum_mismatch", WRONG_BYTES),
    ],
)
def test_exit_codes(name: str, code: int) -> None:
    assert exit_code(error_of(name)) == code


def test_every_error_has_an_exit_code_and_comes_back_from_its_reason() -> None:
    for code, cls in BY_CODE.items():
        assert type(error_of(reason(code))) is cls
        assert ABSENT <= exit_code(cls()) <= WRONG_BYTES


def test_what_to_do_fits_what_happened() -> None:
    away = said(error_of("unavailable", "no value of k: unavailable"), Session())
    assert "drive or target" in away and "is the node running" not in away
    assert "is the node running" in said(Unavailable("the node does not answer"), Session())
    assert "limit" not in said(VolumeMismatch("of another node", limit="77f4"), Session())
    assert "limit: 4096" in said(VolumeMismatch("cut from outside", limit=4096), Session())


def test_the_worst_of_a_batch_decides() -> None:
    assert worst(["ok", "ok"]) == OK
    assert worst(["ok", "absent"]) == ABSENT
    assert worst(["absent", "unavailable", "ok"]) == UNAVAILABLE
    assert worst(["checksum_mismatch", "unavailable"]) == WRONG_BYTES


def test_keys() -> None:
    assert parse_key("grüße", False) == "grüße".encode()
    assert parse_key("00ff", True) == b"\x00\xff"
    assert show_key(b"logs/a") == "logs/a"
    assert parse_key("0x00ff", True) == b"\x00\xff" and show_key(b"0x00") == "0x30783030"
    assert key_fields(b"0x00") == {"key": "0x00", "key_hex": "30783030"}
    assert show_key(b"\x00\xff") == "0x00ff" and show_key(b"a\nb") == "0x610a62"
    assert key_fields(b"a") == {"key": "a", "key_hex": "61"}
    assert key_fields(b"\xff") == {"key": None, "key_hex": "ff"}
    with pytest.raises(KeySize):
        parse_key("", False)
    with pytest.raises(InvalidArgument):
        parse_key("0", True)


def test_figures_for_people() -> None:
    assert [format_size(n) for n in (0, 1023, 1024, 1536, 64 << 20, 5 << 40)] == [
        "0 B",
        "1023 B",
        "1 KiB",
        "1.5 KiB",
        "64 MiB",
        "5 TiB",
    ]
    assert [format_duration(n) for n in (0.5, 350, 4200, 185_000, 187_200_000)] == [
        "0.5 ms",
        "350 ms",
        "4.2 s",
        "3 min 5 s",
        "2 d 4 h",
    ]
    assert format_time(0) == "" and format_time(1_000) == "1970-01-01T00:00:01Z"


def test_errors_carry_their_code_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["put", "k" * 1025, "-"]) == USAGE
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("forebay: a key of 1025 bytes") and "limit: 1 to 1024" in line
    assert line.count("KeySize 1001") == 1
    assert json.dumps(Absent().to_dict())


@pytest.mark.parametrize("option", ["--quota=5000PiB", "--ttl=99999999999d"])
def test_more_than_any_node_takes_is_told_in_words(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["namespace", "create", "acme/chat", option]) == USAGE
    assert "is more than any node takes" in capsys.readouterr().err
