"""`forebay help` and `forebay completion`."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest

from forebay.cli.exits import ABSENT, MEANINGS, OK, USAGE
from forebay.cli.main import cli, run
from forebay.cli.topics import MISSES, TOPICS
from forebay.errors import (
    BY_CODE,
    CapacityShort,
    DataDirInUse,
    DataDirNewer,
    InvalidArgument,
    MetadataCorrupt,
    ValueSize,
    VolumeMismatch,
    reason,
)
from tests.cli.shell import Shell

# Of a call's arguments, which raise, and of a node's start.
NEVER_OF_A_KEY = (InvalidArgument, DataDirInUse, DataDirNewer, CapacityShort, VolumeMismatch, MetadataCorrupt)


@pytest.mark.parametrize("name", TOPICS)
def test_topics(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["help", name]) == OK
    text = capsys.readouterr().out
    assert text.startswith(f"{name}: {TOPICS[name].title}\n") and len(text.splitlines()) > 8
    assert all(len(line) <= 120 for line in text.splitlines())
    for command in re.findall(r"`forebay ([a-z][a-z -]*)", text):
        first = command.split()[0]
        assert first in cli.commands, command


def test_every_reason_that_a_key_can_have_is_explained() -> None:
    possible = {
        reason(code) for code, cls in BY_CODE.items() if cls is ValueSize or not issubclass(cls, NEVER_OF_A_KEY)
    }
    # nothing has a cluster map yet
    assert possible - {"forebay_error", "stale_map"} == set(MISSES)


def test_exit_codes_are_those_of_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    run(["help", "exit-codes"])
    text = capsys.readouterr().out
    assert all(meaning in text for meaning in MEANINGS.values())


def test_help_lists_topics_and_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["help"]) == OK
    text = capsys.readouterr().out
    assert all(name in text for name in (*TOPICS, *cli.commands))


def test_help_of_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["help", "namespace", "scope-quota"]) == OK
    assert "Usage: forebay namespace scope-quota" in capsys.readouterr().out
    for words in (["nonsense"], ["namespace", "nonsense"], ["put", "put"]):
        assert run(["help", *words]) == ABSENT
        (line,) = capsys.readouterr().err.splitlines()
        assert "nonsense" in line or "put put" in line


def complete(*words: str, **environment: str) -> list[str]:
    """What bash would offer for the last word."""
    asked = {"_FOREBAY_COMPLETE": "bash_complete", "COMP_WORDS": " ".join(words), "COMP_CWORD": str(len(words) - 1)}
    environment = {**os.environ, "FOREBAY_DATA": "/no/such", **asked, **environment}
    command = [sys.executable, "-m", "forebay.cli.main"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60)
    return [line.split(",", 1)[1] for line in done.stdout.split()]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_scripts(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["completion", shell]) == OK
    script = capsys.readouterr().out
    assert "_FOREBAY_COMPLETE" in script and f"{shell}_complete" in script
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=script, text=True, check=True, timeout=60)
    assert run(["completion", "tcsh"]) == USAGE


@pytest.mark.skipif(not shutil.which("bash"), reason="no bash")
def test_bash_itself(tmp_path: Path) -> None:
    program = tmp_path / "forebay"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m forebay.cli.main "$@"\n')
    program.chmod(0o755)
    script = 'eval "$(forebay completion bash)"; COMP_WORDS=(forebay name); COMP_CWORD=1; _forebay_completion forebay\n'
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", script + 'echo "${COMPREPLY[@]}"'], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.split() == ["namespace"], done.stderr


def test_completion_of_commands_options_and_topics() -> None:
    assert complete("forebay", "na") == ["namespace"]
    assert complete("forebay", "namespace", "s") == ["scope-quota", "set", "show"]
    assert "--ttl" in complete("forebay", "namespace", "create", "--t")
    assert complete("forebay", "help", "mis") == ["misses"]


def test_without_a_node_there_are_no_names() -> None:
    assert complete("forebay", "namespace", "show", "") == []
    assert complete("forebay", "namespace", "show", "", FOREBAY_URL="127.0.0.1:9", FOREBAY_TOKEN="x") == []


def test_names_of_namespaces_come_from_the_node(forebay: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    data = os.environ["FOREBAY_DATA"]
    monkeypatch.setattr("forebay.cli.context._COMPLETION_MS", 10_000)  # a busy machine is not what is tested
    context = cli.make_context("forebay", ["--data", data, "namespace", "show", "x"], resilient_parsing=True)
    command = cli.commands["namespace"]
    assert isinstance(command, click.Group)
    (parameter,) = [p for p in command.commands["show"].params if p.name == "name"]
    found = [item.value for item in parameter.shell_complete(context, "def")]
    assert found == ["default/default"]
    assert parameter.shell_complete(context, "x") == []
