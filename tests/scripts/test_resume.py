"""How a script resumes, as its source and its capture show."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from captures import LOOP, TRAINER

from zerofit.scripts.resume import ResumeWay, resume_way

_ARGPARSE = "parser.add_argument('--resume_from_checkpoint', type=str, default=None)"
_HYPHENS = "parser.add_argument('--resume-from-checkpoint', type=Path, metavar='DIR')"
_SWITCH = "parser.add_argument('-r', '--resume', action='store_true')"
_CLICK = "@click.option('--resume-from', type=Path)\ndef main(resume_from): ..."
_DATACLASS = "@dataclass\nclass Arguments:\n    resume_from_checkpoint: str | None = None"
_SWITCH_FIELD = "@dataclass\nclass Arguments:\n    resume: bool = False"
_LOADS = "if folders:\n    accelerator.load_state(folders[-1])"
_FINDS = "last = get_last_checkpoint(folder)"


@pytest.mark.parametrize(
    ("source", "way"),
    [
        (_ARGPARSE, ResumeWay(option="--resume_from_checkpoint")),
        (_HYPHENS, ResumeWay(option="--resume-from-checkpoint")),
        (_SWITCH, ResumeWay(option="--resume", is_switch=True)),
        (f"{_SWITCH}\n{_ARGPARSE}", ResumeWay(option="--resume_from_checkpoint")),
        (_CLICK, ResumeWay(option="--resume-from")),
        (_DATACLASS, ResumeWay(option="--resume_from_checkpoint")),
        (_SWITCH_FIELD, ResumeWay(option="--resume", is_switch=True)),
        (_LOADS, ResumeWay(loads_by_itself=True)),
        (_FINDS, ResumeWay(loads_by_itself=True)),
        ("parser.add_argument('--resumed-by')", ResumeWay()),
        ("not python (", ResumeWay()),
    ],
)
def test_a_loops_way_is_in_its_source(source: str, way: ResumeWay, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(source)
    capture = replace(LOOP, target=(str(script),))
    assert resume_way(capture) == way
    assert way.is_known is (way != ResumeWay())


def test_a_trainer_resumes_by_itself_and_what_was_not_captured_by_no_known_way() -> None:
    assert resume_way(TRAINER) == ResumeWay(is_by_trainer=True)
    assert resume_way(None) == ResumeWay(is_unread=True)


@pytest.mark.parametrize(
    ("way", "said", "arguments"),
    [
        (ResumeWay(option="--resume_from"), "--lr 1", "--lr 1 --resume_from /c"),
        (ResumeWay(option="--resume_from"), "--resume_from /old --lr 1", "--lr 1 --resume_from /c"),
        (ResumeWay(option="--resume_from"), "--resume-from=/old --lr 1", "--lr 1 --resume_from /c"),
        (ResumeWay(option="--resume", is_switch=True), "--resume --lr 1", "--lr 1 --resume"),
        (ResumeWay(option="--resume", is_switch=True), "--lr 1", "--lr 1 --resume"),
        (ResumeWay(loads_by_itself=True), "--lr 1", "--lr 1"),
        (ResumeWay(is_by_trainer=True), "--lr 1", "--lr 1"),
    ],
)
def test_the_checkpoint_takes_the_place_of_an_older_one(way: ResumeWay, said: str, arguments: str) -> None:
    target = ("train.py", *said.split())
    assert way.with_checkpoint(target, Path("/c")) == ("train.py", *arguments.split())
