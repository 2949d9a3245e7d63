"""The command line: `localspec COMMAND`. Each command lives in a file of its own."""

from __future__ import annotations

import io
import sys
from importlib import import_module

import click

from localspec._version import __version__
from localspec.errors import LocalspecError

_COMMANDS = {
    "bench": "localspec.cli.bench:bench",
    "calibrate": "localspec.cli.calibrate:calibrate",
    "chat": "localspec.cli.chat:chat",
    "convert": "localspec.cli.convert:convert",
    "doctor": "localspec.cli.doctor:doctor",
    "generate": "localspec.cli.generate:generate",
    "inspect": "localspec.cli.inspect:inspect",
    "models": "localspec.cli.models:models",
    "pull": "localspec.cli.pull:pull",
    "serve": "localspec.cli.serve:serve",
    "train": "localspec.cli.train:train",
    "tune": "localspec.cli.tune:tune",
}


class _LazyGroup(click.Group):
    """Imports a command when it is named, so that `localspec --help` stays quick."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        place = _COMMANDS.get(cmd_name)
        if place is None:
            return None
        module, attribute = place.split(":")
        command = getattr(import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="localspec")
def cli() -> None:
    """Fast local LLM inference for one person on one machine.

    Runs GGUF models through llama.cpp and speeds them up with drafters. Where no model is named,
    the default pair is used: SmolLM2-135M-Instruct and the drafter that ships with localspec.
    """


def one_line(text: object) -> str:
    """A message or name, printable: they come from anywhere, even with line breaks and escapes."""
    return "".join(c if c.isprintable() else "?" for c in str(text))


def main() -> None:
    """Entry point: errors are one line; exit status 1 for errors, 2 for wrong usage."""
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, io.TextIOWrapper):  # None when closed
            stream.reconfigure(errors="replace")
    try:
        status = cli(standalone_mode=False)
    except click.exceptions.Exit as e:
        status = e.exit_code
    except click.ClickException as e:
        e.show()
        status = e.exit_code
    except LocalspecError as e:
        click.echo(f"error: {one_line(e)}", err=True)
        status = 1
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        status = 130
    except BrokenPipeError:
        # The reader went away; let nothing be flushed into the closed pipe at exit.
        sys.stdout = None
        status = 141
    except OSError as e:  # e.g. the disk that standard output goes to is full
        click.echo(f"error: {one_line(e)}", err=True)
        sys.stdout = None
        status = 1
    sys.exit(status if isinstance(status, int) else 0)
