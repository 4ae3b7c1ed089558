"""Rules on files that are missing or can't be parsed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerofit.checking.rule import ACCELERATE, Hit, Rule, Severity, declared, fails
from zerofit.configs.document import CutBlanks, FileKind
from zerofit.core.setting import Confidence, Place

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from zerofit.checking.situation import Situation


_FIX = "fix the text at this position"


def _broken(kind: FileKind) -> Callable[[Situation], Iterator[Hit]]:
    def find(situation: Situation) -> Iterator[Hit]:
        for broken in situation.broken:
            if broken.kind is kind:
                error = broken.error
                place = Place(file=broken.name, line=error.line, column=error.column)
                yield Hit(found=error.problem, place=place, why=error.why, fix=error.fix)

    return find


_DEEPSPEED_SYNTAX = Rule(
    id="deepspeed-syntax",
    severity=Severity.ERROR,
    summary="the DeepSpeed configuration can't be read",
    why="DeepSpeed, accelerate and Trainer all stop at the first invalid character",
    fix=_FIX,
    see="https://www.json.org/json-en.html",
    find=_broken(FileKind.DEEPSPEED),
    evidence=fails("Error"),
)


_ACCELERATE_SYNTAX = Rule(
    id="accelerate-syntax",
    severity=Severity.ERROR,
    summary="the accelerate configuration can't be read",
    why="accelerate stops at the first invalid character, before it starts anything",
    fix=_FIX,
    see="https://yaml.org/spec/1.1/",
    find=_broken(FileKind.ACCELERATE),
    evidence=fails("while parsing"),
)


_FSDP_SYNTAX = Rule(
    id="fsdp-config-syntax",
    severity=Severity.ERROR,
    summary="the file of fsdp_config can't be read",
    why="Trainer reads strict JSON, and stops at the first invalid character",
    fix=_FIX,
    see="https://github.com/huggingface/transformers/blob/v5.23.0/src/transformers/training_args.py",
    find=_broken(FileKind.FSDP),
    evidence=fails("JSONDecodeError"),
)


_SCRIPT_SYNTAX = Rule(
    id="script-syntax",
    severity=Severity.ERROR,
    summary="the script can't be read",
    why="Python stops before it runs the first line",
    fix=_FIX,
    see="https://docs.python.org/3/reference/",
    find=_broken(FileKind.SCRIPT),
    evidence=fails("SyntaxError"),
)


@Rule(
    id="named-file-missing",
    severity=Severity.ERROR,
    summary="a named configuration does not exist",
    why="accelerate, Trainer and zerofit look for it in the folder in which the command runs",
    fix="write the path relative to the folder in which the command runs, and run zerofit there",
    see=f"{ACCELERATE}/utils/deepspeed.py#L154-L156",
    evidence=fails("Expected a string path to an existing deepspeed config"),
)
def _missing(situation: Situation) -> Iterator[Hit]:
    for said in situation.missing:
        yield Hit(found=said.text, place=said.place, confidence=said.confidence)


@Rule(
    id="launched-script-missing",
    severity=Severity.ERROR,
    summary="there is no such script",
    why="the launcher starts it in each rank, and each fails",
    fix="name the script's file, or use -m for a module",
    see="https://huggingface.co/docs/accelerate/basic_tutorials/launch",
    evidence=fails(not_reproduced="the harness starts scripts that exist"),
)
def _missing_script(situation: Situation) -> Iterator[Hit]:
    error = situation.missing_script
    if error is not None:
        yield Hit(found=error.found, why=error.why, fix=error.fix)


_BLANK_BEHIND = "BLANK_BEHIND"
_CAUSES = {
    "MISSING": ("nothing continues the line", "end the line with a \\"),
    _BLANK_BEHIND: ("a blank is behind the \\, so that it continues nothing", "remove the blank"),
    "CARRIAGE_RETURN": (
        "Windows line ends: a carriage return is behind the \\, so that it continues nothing",
        "convert the file: dos2unix FILE",
    ),
    "COMMENT": (
        "a comment ends the command, whatever is in it",
        "move the comment above the command",
    ),
    "EMPTY_LINE": ("an empty line ends the command", "remove the empty line"),
}
"""What is wrong and the fix, by the names of BreakCause, which is not imported without a shell script."""


@Rule(
    id="launch-line-broken",
    severity=Severity.ERROR,
    summary="the launch line ends too early, and loses what follows",
    why="a shell ends a command at a line end, unless a \\ is the very last character before it",
    fix="end each line but the last with a \\",
    see="https://www.gnu.org/software/bash/manual/bash.html#Escape-Character",
    evidence=fails(not_reproduced="the harness starts commands without a shell"),
)
def _broken_lines(situation: Situation) -> Iterator[Hit]:
    for broken in situation.breaks:
        cause, fix = _CAUSES[broken.cause.name]
        if broken.lost:
            why = f"{cause}; the shell takes {broken.lost} for a command of its own"
            edit = CutBlanks(document=broken.place.file, line=broken.place.line)
            edits = (edit,) if broken.cause.name == _BLANK_BEHIND else ()
            yield Hit(found=f"{broken.lost} is lost", place=broken.place, why=why, fix=fix, edits=edits)
        else:
            why = "the script gets the blank behind the \\ as an argument, which argparse refuses"
            found = "a \\ and a blank at the end"
            yield Hit(
                found=found, place=broken.place, why=why, fix="remove both", confidence=Confidence.LIKELY
            )


RULES = declared(vars())
