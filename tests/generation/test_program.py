"""Messages of a rank of `zerofit generate`: where memory runs out, how far it is, what it took."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING

import pytest

from zerofit.core.errors import UserError
from zerofit.generation.generation_job import Completion, FinishReason, Generated, GenerationJob
from zerofit.generation.program import explained, result_of, shown_progress, summary
from zerofit.ranks.exchange import Ranks

if TYPE_CHECKING:
    from pathlib import Path

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
        (_JOB, "start it again with --batch-size 3: it resumes where it stopped"),
        (
            dataclasses.replace(_JOB, generation={"do_sample": True}),
            "start it again with --batch-size 3, and another --out: other batches sample other tokens",
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
    assert caught.value.found.startswith(f"{job.batch_size} prompts per call: no room")
    assert caught.value.fix == fix


_AGAIN = "start it again with"


@pytest.mark.parametrize(
    ("offload", "is_of_gpu", "is_loading", "fix"),
    [
        (None, True, False, f"{_AGAIN} --param-offload cpu: it resumes where it stopped"),
        (None, True, True, f"{_AGAIN} --param-offload cpu: it resumes where it stopped"),
        (
            "cpu",
            True,
            True,
            f"{_AGAIN} --param-offload nvme and --nvme-path DIR: it resumes where it stopped",
        ),
        ("nvme", True, False, f"{_AGAIN} a smaller --max-new-tokens, or with shorter prompts"),
        (None, False, False, f"{_AGAIN} a smaller --max-new-tokens, or with shorter prompts"),
        (
            None,
            False,
            True,
            "end other processes, or use fewer ranks with --num-processes, or a smaller --dtype",
        ),
    ],
)
def test_where_batches_are_no_way_out_the_advice_is_what_is_left(
    tmp_path: Path, offload: str | None, is_of_gpu: bool, is_loading: bool, fix: str
) -> None:
    import torch

    config = tmp_path / "deepspeed.json"
    config.write_text(json.dumps({"zero_optimization": {"offload_param": {"device": offload}}}))
    job = dataclasses.replace(_JOB, batch_size=1, deepspeed=str(config) if offload else None)
    with pytest.raises(UserError) as caught, explained(job, is_loading=is_loading):
        raise torch.OutOfMemoryError("no room") if is_of_gpu else MemoryError("no room")
    found = "loading the weights: no room" if is_loading else "1 prompt per call: no room"
    assert (caught.value.found, caught.value.fix) == (found, fix)


def test_what_is_said_in_arguments_is_said_in_flags() -> None:
    error = UserError(
        "generate-out-of-step", "s", found="use_mtp", why="w", fix='gather once, with gather="always"'
    )
    with pytest.raises(UserError) as caught, explained(_JOB):
        raise error
    assert caught.value.fix == "add --gather always, or leave the setting out"


@pytest.mark.parametrize(
    ("rank", "rule", "ends_with"),
    [(0, "of-all", UserError), (1, "of-all", SystemExit), (0, "of-one", UserError), (1, "of-one", UserError)],
)
def test_what_all_ranks_raise_rank_0_says_for_them(
    rank: int, rule: str, ends_with: type[UserError | SystemExit]
) -> None:
    from torch import distributed
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend "fake"

    assert FakeStore
    distributed.init_process_group("fake", store=distributed.HashStore(), rank=rank, world_size=2)
    error = UserError(rule, "s", found="f", why="w", fix="x", exit_code=7)
    error.is_on_every_rank = rule == "of-all"
    try:
        with pytest.raises(ends_with) as caught, explained(_JOB):
            raise error
    finally:
        distributed.destroy_process_group()
    ended: BaseException = caught.value
    assert (ended.exit_code if isinstance(ended, UserError) else getattr(ended, "code", None)) == 7


def test_what_ranks_agree_on_is_raised_on_every_rank() -> None:
    def refuse() -> None:
        raise UserError("rule", "s", found="f", why="w", fix="x")

    with pytest.raises(UserError) as caught:
        Ranks(rank=0, size=1).agreed(refuse)
    assert caught.value.is_on_every_rank


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
def test_progress_is_a_line_now_and_then(
    capsys: pytest.CaptureFixture[str], is_shown: bool, every_s: float, expected: str
) -> None:
    show = shown_progress(is_shown=is_shown, every_s=every_s)
    show(1, 3)
    show(2, 3)
    assert capsys.readouterr() == ("", expected)


def test_a_result_is_the_line_with_its_completions() -> None:
    completion = {"text": "t", "finish_reason": "stop", "num_new_tokens": 2}
    document = {"index": 3, "num_prompt_tokens": 5, "completions": [{**completion, "tokens": [1, 2]}]}
    fields = {"id": 7, "prompt": "p", "index": "mine"}
    assert result_of(fields, document) == {**fields, "completions": [completion]}
    assert list(result_of(fields, document)) == ["id", "prompt", "index", "completions"]
