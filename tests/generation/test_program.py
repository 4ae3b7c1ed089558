"""What a rank of `zerofit generate` says: where memory runs out, how far it is, what it took."""

from __future__ import annotations

import dataclasses

import pytest

from zerofit.errors import UserError
from zerofit.generated import Completion, FinishReason, Generated
from zerofit.generation import shown_progress
from zerofit.generation.program import explained, summary
from zerofit.generation.shown_progress import ShownProgress
from zerofit.generation_job import GenerationJob

_JOB = GenerationJob(
    model="m",
    tokenizer="m",
    prompts="prompts.jsonl",
    out="out.jsonl",
    fingerprint="f",
    dtype="float32",
    batch_size=6,
    max_new_tokens=8,
    generation={"do_sample": False},
)


@pytest.mark.parametrize(
    ("job", "fix"),
    [
        (_JOB, "start it again with --batch-size 3: it goes on where it stopped"),
        (
            dataclasses.replace(_JOB, generation={"do_sample": True}),
            "start it again with --batch-size 3, having removed out.jsonl.parts: "
            "other batches draw other tokens",
        ),
        (
            dataclasses.replace(_JOB, batch_size=1),
            "start it again with --param-offload cpu: it goes on where it stopped",
        ),
    ],
)
@pytest.mark.parametrize("kind", ["torch", "python", "allocator"])
def test_memory_that_runs_out_is_said_in_words(job: GenerationJob, fix: str, kind: str) -> None:
    import torch

    error = {
        "torch": torch.OutOfMemoryError("no room\nmore"),
        "python": MemoryError("no room"),
        "allocator": RuntimeError("no room: DefaultCPUAllocator: can't allocate memory"),
    }[kind]
    with pytest.raises(UserError) as caught, explained(job):
        raise error
    assert (caught.value.rule, caught.value.exit_code) == ("generate-out-of-memory", 1)
    assert caught.value.found.startswith(f"{job.batch_size} prompts in a call: no room")
    assert caught.value.fix == fix


def test_other_errors_stay_as_they_are() -> None:
    with pytest.raises(RuntimeError, match="shapes differ"), explained(_JOB):
        raise RuntimeError("shapes differ")


def _results(*num_tokens: int) -> list[Generated]:
    return [
        Generated(
            index=index,
            num_prompt_tokens=1,
            completions=(Completion(tokens=(1,) * number, text="", finish_reason=FinishReason.LENGTH),),
        )
        for index, number in enumerate(num_tokens)
    ]


@pytest.mark.parametrize(
    ("made", "num_prompts", "expected"),
    [
        ((5, 7), 2, "zerofit: 2 prompts, 12 new tokens in 2.0 s: 6.0 tokens/s"),
        ((5,), 1, "zerofit: 1 prompt, 5 new tokens in 2.0 s: 2.5 tokens/s"),
        (
            (5,),
            9,
            "zerofit: 1 prompt (of 9; the others were done before), 5 new tokens in 2.0 s: 2.5 tokens/s",
        ),
        (
            (),
            9,
            "zerofit: 0 prompts (of 9; the others were done before), 0 new tokens in 2.0 s: 0.0 tokens/s",
        ),
    ],
)
def test_the_summary(made: tuple[int, ...], num_prompts: int, expected: str) -> None:
    assert summary(_results(*made), num_prompts=num_prompts, took_s=2.0) == expected


@pytest.mark.parametrize(
    ("is_shown", "every_s", "expected"),
    [
        (True, 0.0, "zerofit: 1 of 3 prompts are done\nzerofit: 2 of 3 prompts are done\n"),
        (True, 1000.0, ""),
        (False, 0.0, ""),
    ],
)
def test_progress_without_a_terminal_is_a_line_now_and_then(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    is_shown: bool,
    every_s: float,
    expected: str,
) -> None:
    monkeypatch.setattr(shown_progress, "_LINE_EVERY_S", every_s)
    with ShownProgress(is_shown=is_shown) as progress:
        progress.show(1, 3)
        progress.show(2, 3)
    assert capsys.readouterr() == ("", expected)
