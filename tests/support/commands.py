"""Commands that the Makefile and the documents tell people to run, word by word."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from zerofit.cli.main import zerofit

ROOT = Path(__file__).parents[2]
BIN = ".environment/bin"
"""The folder of programs that `make -n` is given; it does not exist."""
_BLOCK = re.compile(r"^(?P<indent> *)```(?P<language>\w*)\n(?P<text>.*?)^ *```$", re.DOTALL | re.MULTILINE)
_SHELL, _SESSION = frozenset({"sh", "bash"}), "console"
_PROGRAMS = frozenset({"zerofit", "make", "python", "python3", "accelerate"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A fenced block of a document."""

    document: str
    """Its path in the repository."""
    line: int
    language: str
    text: str

    def commands(self) -> tuple[str, ...]:
        """Return what it tells people to run, each command on one line; nothing where it is no shell's."""
        lines = self.text.replace("\\\n", " ").splitlines()
        prompted = [line.strip().removeprefix("$ ") for line in lines if line.strip().startswith("$ ")]
        if self.language == _SESSION or (not self.language and prompted):
            return tuple(prompted)
        is_shell = self.language in _SHELL or (not self.language and lines[0].split()[0] in _PROGRAMS)
        found = (line.strip() for line in lines if is_shell)
        return tuple(line for line in found if line and not line.startswith("#"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One command of a document or of a target."""

    where: str
    text: str

    @property
    def words(self) -> tuple[str, ...]:
        """Its words as a shell sees them, without variables in front and a comment behind."""
        try:
            words = shlex.split(self.text, comments=True)
        except ValueError:  # an apostrophe: no command, but the form of one, or a sentence
            return ()
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            words.pop(0)
        return tuple(words)


def documents() -> tuple[str, ...]:
    """Return the paths of all documents of the repository."""
    pages = (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("ds_configs/*.md"))
    return tuple(sorted(str(page.relative_to(ROOT)) for page in pages))


def blocks(document: str) -> Iterator[Block]:
    """Yield the fenced blocks of a document."""
    text = (ROOT / document).read_text(encoding="utf-8")
    for found in _BLOCK.finditer(text):
        yield Block(
            document=document,
            line=text.count("\n", 0, found.start()) + 1,
            language=found["language"],
            text=found["text"],
        )


def documented() -> tuple[Command, ...]:
    """Return the commands of all documents and, from their comments, of the recipes in launch/."""
    of_blocks = (
        Command(where=f"{block.document}:{block.line}", text=text)
        for document in documents()
        for block in blocks(document)
        for text in block.commands()
    )
    return (*of_blocks, *_of_recipes())


def parse(words: Sequence[str]) -> click.Context:
    """Parse the arguments of zerofit as it does, and start nothing.

    Raises:
        click.UsageError: there is no such verb or flag.
    """
    group: click.Command = zerofit
    context = zerofit.context_class(zerofit, info_name="zerofit", **zerofit.context_settings)
    rest = list(words)
    while isinstance(group, click.Group) and rest:
        name, found, rest = group.resolve_command(context, rest)
        assert found is not None
        if not isinstance(found, click.Group):
            return found.make_context(name, rest, parent=context)
        group, context = found, click.Context(found, info_name=name, parent=context, **found.context_settings)
    return context


def _of_recipes() -> Iterator[Command]:
    for recipe in sorted((ROOT / "launch").iterdir()):
        for number, line in enumerate(recipe.read_text(encoding="utf-8").splitlines(), start=1):
            if re.match(r"#   \S", line):
                yield Command(where=f"launch/{recipe.name}:{number}", text=line.removeprefix("#").strip())


def targets() -> dict[str, str]:
    """Return the targets of the Makefile, each with its help; without one the help is empty."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    found = re.findall(r"^([a-z][a-z0-9-]*):(?!=)[^#\n]*(?:## *(.*))?$", makefile, re.MULTILINE)
    return dict(found)


def made(target: str, *variables: str) -> tuple[Command, ...]:
    """Return what `make TARGET` would run, once the environment is set up."""
    installed = f"{BIN.removesuffix('/bin')}/.installed"
    environment = f"VENV={BIN.removesuffix('/bin')}"
    dry = subprocess.run(
        ["make", "--dry-run", "--no-print-directory", "-o", installed, environment, *variables, target],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert (dry.returncode, dry.stderr) == (0, ""), dry.stderr
    lines = (text for line in dry.stdout.splitlines() for text in _of_loop(line))
    return tuple(Command(where=f"make {target}", text=one) for line in lines for one in line.split(" && "))


def _of_loop(line: str) -> list[str]:
    """Return the commands of a line; those of a loop of the shell, with each value of its variable."""
    loop = re.fullmatch(r"for (\w+) in ([^;]+); do (.*?)(?: \|\| exit 1)?; done", line)
    if loop is None:
        return [line]
    return [loop[3].replace(f"${loop[1]}", value) for value in loop[2].split()]


def python_script(command: Command) -> tuple[str, tuple[str, ...]] | None:
    """Return the file that a command runs with Python, and its arguments; None where it runs none."""
    words = command.words
    if not words or Path(words[0]).name not in ("python", "python3") or not words[1].endswith(".py"):
        return None
    return words[1], words[2:]
