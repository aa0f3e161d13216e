"""Strings that run a program if a shell interprets them, to check that no shell does."""

from __future__ import annotations

import os
import secrets
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from dgxlab.transport.base import CommandFailed
from dgxlab.transport.ssh import MARK, framed, quote
from faults.fault import Broken

SHAPES = (
    *("$({c})", "`{c}`", ";{c}", ";{c};", "|{c}", "&{c}", "&&{c}", "||{c}", "\n{c}\n", "\n{c}", "\r\n{c}", "({c})"),
    *("';{c};'", '";{c};"', "'\n{c}\n'", "'\"'\"';{c};'", "\\';{c};\\'", '\\";{c};\\"', "\\\n{c}", "$'\\n'{c}"),
    *(
        "${{x:-$({c})}}",
        "${{IFS}}$({c})",
        "<({c})",
        ">({c})",
        "%$({c})",
        "%({c})s",
        "=$({c})",
        "#\n{c}",
        "* ;{c}",
        "!{c}",
    ),
    *(
        "-oProxyCommand={c}",
        "--upload-pack={c}",
        "-e {c}",
        "-c {c}",
        "-$({c})",
        "--",
        "-",
        "%h;{c}",
        "\u2028{c}",
        "\t{c}",
    ),
    *(
        "{{bin}};{c}",
        "{{src}}$({c})",
        "{{agent}}`{c}`",
        "$ENV{{PATH}};{c}",
        "$$({c})",
        "$${c}",
        "\\$({c})",
        "\\`{c}\\`",
    ),
)


@dataclass(frozen=True)
class Canary:
    """A program that writes a file when it is run."""

    program: Path

    @property
    def sang(self) -> bool:
        """Whether the program was run."""
        return self.trace.exists()

    @property
    def trace(self) -> Path:
        """The file that it writes."""
        return self.program.with_name("sang")

    def word(self, random: Random, called: str = "") -> str:
        """Return a random string that runs the program, by its path or as `called`, if a shell interprets it."""
        shape = "".join(random.choice(SHAPES) for _ in range(random.choice((1, 1, 1, 2))))
        before, after = random.choice(("", "", "a", "x y", "~/", "/x/")), random.choice(("", "", "b", "/y", " "))
        return before + shape.format(c=called or self.program) + after

    def check(self, what: object) -> None:
        """Check that the program was not run, by `what`.

        Raises:
            Broken: if it was.
        """
        if self.sang:
            self.trace.unlink()
            raise Broken(f"a program was run by {what!r}")


def canary(folder: Path) -> Canary:
    """Write the program into a folder."""
    program = folder / "canary"
    program.write_text(f'#!/bin/sh\n: > "{folder}/sang"\n')
    program.chmod(0o755)
    return Canary(program)


@dataclass
class ShellTransport:
    """A transport that gives a login shell of this machine the line that ssh would send; see Transport."""

    root: str
    python: str
    home: Path
    shell: str
    name: str = "box"

    def stream(
        self, argv: Sequence[str], stdin: Iterable[bytes] = (), *, patience_s: float | None = None
    ) -> Iterator[bytes]:
        """Run `argv` in the shell; see Transport."""
        nonce = secrets.token_hex(8)
        ran = subprocess.run(
            [self.shell, "-c", framed(quote(argv), nonce)],
            input=b"".join(stdin),
            capture_output=True,
            cwd=self.home,
            env={"HOME": str(self.home), "PATH": os.environ["PATH"], "DGXLAB_LOCKS": str(self.home)},
            timeout=patience_s,
            check=False,
        )
        mark = f"{MARK}{nonce}\n".encode()
        _, begun, out = ran.stdout.partition(mark)
        if not begun:
            raise Broken(f"the shell did not run the command: {argv!r}: {ran.stderr!r}")
        if out:
            yield out
        if ran.returncode != 0:
            raise CommandFailed(ran.returncode, ran.stderr.partition(mark)[2].decode(errors="replace"))
