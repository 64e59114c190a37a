"""`forebay help` and `forebay completion`: how to find one's way."""

from __future__ import annotations

import textwrap

import click

from forebay.cli.exits import ABSENT, OK, USAGE
from forebay.cli.teaching import Command
from forebay.cli.topics import TOPICS
from forebay.errors import NotFound

__all__ = ["completion", "help_"]

_WIDTH = 100


def _complete_words(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    root = ctx.find_root().command
    words = [*TOPICS, *(root.commands if isinstance(root, click.Group) else ())]
    return sorted(word for word in words if word.startswith(incomplete))


@click.command(
    "help",
    cls=Command,
    short_help="Explain a command or a concept.",
    examples=["forebay help", "forebay help misses", "forebay help namespace create"],
    exits=(OK, ABSENT, USAGE),
    see=("forebay --help",),
)
@click.argument("words", nargs=-1, metavar="[COMMAND|TOPIC]...", shell_complete=_complete_words)
@click.pass_context
def help_(ctx: click.Context, words: tuple[str, ...]) -> int:
    """Show the page of a command, or of a concept: without arguments, list both. Needs no node."""
    root = ctx.find_root()
    if not words:
        click.echo("Concepts (forebay help TOPIC):\n")
        for name, topic in TOPICS.items():
            click.echo(f"  {name:<12} {topic.title}")
        click.echo(f"\n{root.get_help()}")
        return OK
    if len(words) == 1 and words[0] in TOPICS:
        topic = TOPICS[words[0]]
        click.echo(f"{words[0]}: {topic.title}\n\n{topic.text()}")
        return OK
    below = root
    for word in words:
        command = below.command.get_command(below, word) if isinstance(below.command, click.Group) else None
        if command is None:
            known = textwrap.fill(", ".join(TOPICS), _WIDTH)
            raise NotFound(f"there is no command or topic {' '.join(words)!r}; topics are {known}", field="topic")
        below = click.Context(
            command, info_name=word, parent=below, max_content_width=_WIDTH, help_option_names=["-h", "--help"]
        )
    click.echo(below.get_help())
    return OK


@click.command(
    cls=Command,
    short_help="Print a shell's completion script.",
    examples=[
        'forebay completion bash >> ~/.bashrc    # or now: eval "$(forebay completion bash)"',
        "forebay completion zsh > ~/.zfunc/_forebay",
        "forebay completion fish > ~/.config/fish/completions/forebay.fish",
    ],
    exits=(OK, USAGE),
    see=("forebay help",),
)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> int:
    """Print the script that completes commands, options and topics in SHELL.

    Names of namespaces are completed too, when the node that the command line (or the environment) names answers within
    200 ms; else there are none. Bash needs version 4.4 or newer.
    """
    from click.shell_completion import get_completion_class

    made = get_completion_class(shell)
    assert made is not None, shell
    # `source()` of bash would first run bash to judge its version, which whoever reads the script can do better.
    found = made(ctx.find_root().command, {}, "forebay", "_FOREBAY_COMPLETE")
    click.echo(found.source_template % found.source_vars())
    return OK
