"""Options read by tyro; what it refuses is one line and exit code 2."""

import contextlib
import io
import re
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import tyro


def parse(options: Any, argv: Sequence[str], *, prog: str, **kwargs: Any) -> Any:
    """Reads a command line.

    Args:
      options: a dataclass, or a union of them as subcommands.
      argv: the words after the program's name.
      prog: the program's name.
      **kwargs: what else `tyro.cli` takes.

    Returns:
      An instance. Help is printed and ends the program with 0; a word that cannot be
      understood, or a value that is refused, is one line on stderr and ends it with 2.
    """
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return tyro.cli(options, args=list(argv), prog=prog, **kwargs)
    except ValueError as error:  # A dataclass refused a value.
        refuse(error, prog=prog)
    except SystemExit as exit_:
        if exit_.code == 2:
            refuse(_first_paragraph(said.getvalue()), prog=prog)
        raise


def refuse(reason: object, *, prog: str) -> NoReturn:
    """Ends the program: one line on stderr, exit code 2.

    Args:
      reason: what was wrong.
      prog: the program's name.
    """
    print(f"{prog}: {reason}", file=sys.stderr)
    raise SystemExit(2)


def _first_paragraph(box: str) -> str:
    """Takes the message, and what it may have meant, out of tyro's framed text."""
    # The first line is the frame's title; rules without a word part the paragraphs.
    lines = [line.strip("│|╰╯ ") for line in box.splitlines()[1:]]
    paragraphs: list[list[str]] = [[]]
    for line in lines:
        if re.search(r"\w", line):
            paragraphs[-1].append(line)
        else:
            paragraphs.append([])
    texts = [paragraph for paragraph in paragraphs if paragraph]
    message = " ".join(texts[0]) if texts else "the options cannot be understood"
    near = re.search(r"Perhaps you meant:?\s+(--[\w-]+)", " ".join(lines))
    hint = f" (perhaps you meant {near[1]})" if near else ""
    return f"{message.rstrip('.')}{hint}; --help lists the options."
