"""Command-line parser of all scripts: one sentence per error, names suggested for misspelt ones, defaults in the help.

It lies in data/, the lowest folder, so that every other may import it. Needs nothing but Python.
"""

from __future__ import annotations

import argparse
import difflib
import os
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn


class HelpFormatter(argparse.HelpFormatter):
    """Help with the defaults that say something; descriptions keep their paragraphs, and indented ones their lines."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text, default = action.help or "", action.default
        if not action.option_strings or "(default" in text or default is None or default is False:
            return text
        return text if default in ("", [], (), argparse.SUPPRESS) else f"{text} (default: {shown(default)})"

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        fill, paragraphs = super()._fill_text, text.strip("\n").split("\n\n")
        return "\n\n".join(p if "\n    " in f"\n{p}" else fill(p, width, indent) for p in paragraphs)


class Parser(argparse.ArgumentParser):
    """argparse without abbreviated flags, whose errors are one sentence: `error: ... (see --help)`, exit code 2."""

    def __init__(self, description: str | None = None, *, see: str = "--help", **options: Any) -> None:
        """see: what every error ends with. options: of argparse.ArgumentParser."""
        super().__init__(description=description, allow_abbrev=False, formatter_class=HelpFormatter, **options)
        self._see = see

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message} (see {self._see})\n")

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:
        known, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.refuse(unknown[0])
        return known

    def refuse(self, argument: str) -> NoReturn:
        """Exit with a sentence about an argument that there is not, and the flag that is spelt most like it."""
        flags = [flag.lstrip("-") for action in self._actions for flag in action.option_strings]
        close = closest(argument.split("=")[0].lstrip("-"), flags)
        self.error(f"unknown flag or value {argument!r}" + f"; did you mean --{close}?" * bool(close))


def run_command(command: Callable[[], object], *errors: type[Exception]) -> int:
    """The exit code of a command: 0, 2 after one sentence on an error of these kinds, 130 after Ctrl-C."""
    try:
        command()
        sys.stdout.flush()
    except BrokenPipeError:  # the reader (`| head`) has what it wanted; Python would complain once more at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except errors as error:
        where = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.filename else error
        print(f"error: {where}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    return 0


def closest(name: str, known: Iterable[str]) -> str:
    """The known name that is spelt most like `name`; "" where none is near."""
    return next(iter(difflib.get_close_matches(name, list(known), n=1)), "")


def shown(default: Any) -> str:
    """A default as it would be given on the command line."""
    return ",".join(map(str, default)) if isinstance(default, list | tuple) else str(default)
