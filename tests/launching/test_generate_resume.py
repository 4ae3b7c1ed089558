"""`zerofit generate` under kill -9: started again, it ends with every prompt once, as if never killed."""

from __future__ import annotations

import itertools
import json
import signal
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from generate_runs import generate_run, kill_when, make_model, process_tree, started, wait_for, write_prompts
from runs import run_command

from zerofit.generation.generation_job import job_from_json, job_to_json

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable
    from pathlib import Path

    import psutil

NUM_PROMPTS = 200
NAMES = [f"p{number}" for number in range(NUM_PROMPTS)]
SAMPLED = ("--do-sample", "--top-k", "40", "--seed", "3")
ONE_RANK = ("--num-processes", "1")
RANKS = {
    "one rank": ONE_RANK,
    "two ranks": ("--num-processes", "2", "--zero-stage", "0"),
    "ZeRO-3": ("--num-processes", "2", "--zero-stage", "3", "--gather", "never"),
    "ZeRO-3 with gathered weights": ("--num-processes", "2", "--zero-stage", "3", "--gather", "always"),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


def write_many(folder: Path, *, page_bytes: int = 0) -> Path:
    """Write 200 prompts; where each has a page beside it, it takes time to put results together."""
    words = itertools.cycle(("the", "cat", "sat", "on", "a", "mat", "and", "slept"))
    prompts = (
        {"id": name, "prompt": " ".join(itertools.islice(words, 1 + number % 7)), "page": "x" * page_bytes}
        for number, name in enumerate(NAMES)
    )
    write_prompts(folder / "prompts.jsonl", prompts)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with prompts, each with a page beside it."""
    return write_many(tmp_path, page_bytes=100_000)


def arguments(model: Path, out: str, *more: str) -> list[str]:
    fixed = ("--max-new-tokens", "32", "--batch-size", "8")
    return ["--model", str(model), "--prompts", "prompts.jsonl", "--out", out, *fixed, *more]


def rank_files(folder: Path) -> list[Path]:
    return list(folder.glob("**/*.jsonl.rank*.jsonl"))


def num_lines(folder: Path) -> int:
    """Return how many results are on disk so far: each file has a line before them."""
    return sum(max(0, path.read_bytes().count(b"\n") - 1) for path in rank_files(folder))


def is_merging(folder: Path) -> bool:
    return any(folder.glob(".out.jsonl.*"))


def uninterrupted(folder: Path) -> bytes:
    """Return the results of the job that runs in a folder did, done once more by one rank in one go."""
    job_file = next(folder.glob("zerofit-runs/*/generation.json"))
    out = folder / "whole.jsonl"
    again = folder / "again.json"
    job = replace(job_from_json(job_file.read_text()), out=str(out), deepspeed=None)
    again.write_text(job_to_json(job))
    run_command([sys.executable, "-m", "zerofit.generation.program", str(again)], folder).check()
    return out.read_bytes()


def names(path: Path) -> list[str]:
    """Return the name in each line of some results."""
    return [json.loads(line)["id"] for line in path.read_text().split("\n")[:-1]]


@pytest.mark.slow
def test_a_run_killed_in_the_middle_goes_on_as_if_it_had_not_been(model: Path, tmp_path: Path) -> None:
    write_many(tmp_path)
    asked = arguments(model, "out.jsonl", *SAMPLED)
    kill_when(lambda: num_lines(tmp_path) >= NUM_PROMPTS // 3, tmp_path, *asked)
    left = num_lines(tmp_path)
    assert NUM_PROMPTS // 3 <= left < NUM_PROMPTS
    again = generate_run(tmp_path, *asked).check()
    assert f"zerofit: {left} of {NUM_PROMPTS} prompts are already done\n" in again.stderr
    assert names(tmp_path / "out.jsonl") == NAMES
    assert (tmp_path / "out.jsonl").read_bytes() == uninterrupted(tmp_path)
    assert rank_files(tmp_path) == []


@pytest.mark.slow
def test_two_ranks_under_zero3_resume_after_a_kill(model: Path, tmp_path: Path, built_ops: None) -> None:
    write_many(tmp_path)
    asked = arguments(model, "out.jsonl", *RANKS["ZeRO-3"])
    kill_when(lambda: num_lines(tmp_path) >= NUM_PROMPTS // 3, tmp_path, *asked)
    left = num_lines(tmp_path)
    assert NUM_PROMPTS // 3 <= left < NUM_PROMPTS
    assert not (tmp_path / "out.jsonl").exists()
    for path in rank_files(tmp_path):
        with path.open("a") as file:
            file.write('{"index": 19')  # as if it had been killed while it wrote a line
    again = generate_run(tmp_path, *asked).check()
    assert f"zerofit: {left} of {NUM_PROMPTS} prompts are already done\n" in again.stderr
    assert names(tmp_path / "out.jsonl") == NAMES
    assert rank_files(tmp_path) == []


@pytest.mark.evidence
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("sampled", [(), SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("ranks", RANKS.values(), ids=RANKS)
def test_runs_killed_at_every_stage_give_what_one_run_gives(
    model: Path, folder: Path, ranks: tuple[str, ...], sampled: tuple[str, ...]
) -> None:
    asked = arguments(model, "out.jsonl", *ranks, *sampled)
    moments: list[Callable[[], bool]] = [
        lambda: bool(rank_files(folder)),
        lambda: num_lines(folder) >= 1,
        lambda: num_lines(folder) >= NUM_PROMPTS // 2,
        lambda: num_lines(folder) >= NUM_PROMPTS - 8,
        lambda: is_merging(folder),
    ]
    for moment in moments:
        before = num_lines(folder)
        kill_when(moment, folder, *asked)
        assert num_lines(folder) >= before
        assert not (folder / "out.jsonl").exists()
    generate_run(folder, *asked).check()
    assert (folder / "out.jsonl").read_bytes() == uninterrupted(folder)
    assert rank_files(folder) == []


@pytest.mark.evidence
@pytest.mark.parametrize("out", ["out.jsonl", "-"])
def test_a_run_that_was_interrupted_says_how_to_go_on(model: Path, folder: Path, out: str) -> None:
    with started(folder, *arguments(model, out, *SAMPLED)) as process:
        wait_for(lambda: num_lines(folder) > 0, process, folder)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 130
    (file,) = rank_files(folder)
    results, num_done = file.with_name(file.name.removesuffix(".rank0.jsonl")), num_lines(folder)
    goes_on = "the same command" if out != "-" else f"the same command with --out {results}"
    assert (folder / "stderr").read_text().splitlines()[-1] == (
        f"zerofit: {num_done} of {NUM_PROMPTS} prompts are done: {goes_on} resumes"
    )
    generate_run(folder, *arguments(model, str(results), *SAMPLED)).check()
    assert names(results) == NAMES


@pytest.mark.evidence
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("ranks", ["two ranks", "ZeRO-3", "ZeRO-3 with gathered weights"])
@pytest.mark.parametrize("killed", [0, 1])
def test_a_run_that_lost_a_rank_ends_and_goes_on_with_another_number_of_ranks(
    model: Path, folder: Path, ranks: str, killed: int
) -> None:
    with started(folder, *arguments(model, "out.jsonl", *RANKS[ranks], *SAMPLED)) as process:
        wait_for(lambda: num_lines(folder) >= NUM_PROMPTS // 3, process, folder)
        _rank_of(process, killed).kill()
        assert process.wait(timeout=60) == 137
    assert f"zerofit: rank {killed} was killed by signal 9 (SIGKILL)" in (folder / "stderr").read_text()
    generate_run(folder, *arguments(model, "out.jsonl", *ONE_RANK, *SAMPLED)).check()
    assert (folder / "out.jsonl").read_bytes() == uninterrupted(folder)


def _rank_of(process: subprocess.Popen[str], rank: int) -> psutil.Process:
    """Return the process of a rank of a run, and not what it has forked."""
    return next(
        child
        for child in process_tree(process)
        if child.environ().get("RANK") == str(rank) and "zerofit.training.runner" in child.cmdline()
    )
