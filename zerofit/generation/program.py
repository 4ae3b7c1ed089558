"""What a rank of `zerofit generate` runs, as `python -m zerofit.generation.program JOB`."""

from __future__ import annotations

import json
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerofit.errors import UserError
from zerofit.generation.loading import joined_ranks, loaded_model
from zerofit.generation.part_folder import part_files, parts_folder
from zerofit.generation.part_lines import PartLines
from zerofit.generation.shown_progress import ShownProgress
from zerofit.generation_job import GenerationJob, job_from_json
from zerofit.prompt_lines import result_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from zerofit.generated import Generated

_LIMIT_S = 1800.0
"""How long to wait for a rank. ASSUMPTION: with weights on NVMe a token takes minutes, not half an hour; a
process group of torch waits as long (torch/distributed/constants.py, default_pg_timeout)."""
_CPU_OUT_OF_MEMORY = "DefaultCPUAllocator: can't allocate memory"
"""c10/core/impl/alloc_cpu.cpp: torch raises a bare RuntimeError."""


def main(arguments: Sequence[str]) -> None:
    """Generate what a job says, with all ranks.

    Args:
        arguments: the job's file.

    Raises:
        UserError: it can't be done; what is done is kept, and a later run goes on from there.
    """
    (job_file,) = arguments
    job = job_from_json(Path(job_file).read_text(encoding="utf-8"))
    with joined_ranks(job), explained(job):
        _run(job)


@contextmanager
def explained(job: GenerationJob) -> Iterator[None]:
    """Say what to do where memory runs out, in place of a traceback.

    Raises:
        UserError: it did.
    """
    import torch

    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        is_known = isinstance(error, torch.OutOfMemoryError | MemoryError)
        if not is_known and _CPU_OUT_OF_MEMORY not in str(error):
            raise
        raise _out_of_memory(job, error) from None


def summary(made: Sequence[Generated], *, num_prompts: int, took_s: float) -> str:
    """Return the last line: how much was generated, and how fast.

    Args:
        made: results of this run.
        num_prompts: all of them, those that were done before with them.
        took_s: to generate them, without loading the model.
    """
    num_tokens = sum(len(completion.tokens) for result in made for completion in result.completions)
    of_all = "" if len(made) == num_prompts else f" (of {num_prompts}; the others were done before)"
    prompts = f"{len(made)} prompt{'s' if len(made) != 1 else ''}{of_all}"
    rate = num_tokens / took_s
    return f"zerofit: {prompts}, {num_tokens} new tokens in {took_s:.1f} s: {rate:.1f} tokens/s"


def _run(job: GenerationJob) -> None:
    """Load the model, generate, and say what that took."""
    from torch import distributed
    from transformers import AutoTokenizer, logging

    from zerofit.generation.generate import generate_and_keep

    is_first = not distributed.is_initialized() or distributed.get_rank() == 0
    if not (is_first and sys.stderr.isatty()):
        logging.disable_progress_bar()  # of loading weights
    documents = _read_prompts(Path(job.prompts))
    tokenizer = AutoTokenizer.from_pretrained(
        job.tokenizer, local_files_only=True, trust_remote_code=job.trust_remote_code
    )
    earlier = _done_earlier(Path(job.out)) if is_first else frozenset()
    with loaded_model(job) as model, ShownProgress(is_shown=is_first) as progress:
        begin = time.perf_counter()
        results = generate_and_keep(
            model,
            [document["tokens"] for document in documents],
            tokenizer=tokenizer,
            max_new_tokens=job.max_new_tokens,
            generation_config=None,
            batch_size=job.batch_size,
            per_rank=False,
            gather=job.gather,
            seed=job.seed,
            out=job.out,
            resume=True,
            limit_s=_LIMIT_S,
            progress=progress.show,
            settings=job.generation,
            fingerprint=job.fingerprint,
            describe=lambda document: result_of(documents[document["index"]]["fields"], document),
        )
        took_s = time.perf_counter() - begin
    if is_first:
        made = [result for result in results if result.index not in earlier]
        print(summary(made, num_prompts=len(results), took_s=took_s), file=sys.stderr)


def _read_prompts(path: Path) -> list[dict[str, Any]]:
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def _done_earlier(out: Path) -> frozenset[int]:
    folder = parts_folder(out)
    return frozenset(PartLines(list(part_files(folder).values()))) if folder.is_dir() else frozenset()


def _out_of_memory(job: GenerationJob, error: BaseException) -> UserError:
    first = (str(error).strip().splitlines() or [type(error).__name__])[0]
    fix = "start it again with --param-offload cpu: it goes on where it stopped"
    if job.batch_size > 1:
        fix = f"start it again with --batch-size {job.batch_size // 2}"
        # Each batch has its own seed: other batches draw tokens that don't go with those that are there.
        drawn = f", having removed {parts_folder(Path(job.out))}: other batches draw other tokens"
        fix += drawn if job.generation.get("do_sample") else ": it goes on where it stopped"
    return UserError(
        "generate-out-of-memory",
        "the memory has run out",
        found=f"{job.batch_size} prompts in a call: {first}",
        why="the weights, the cache of all prompts of a call and what is computed did not fit together",
        fix=fix,
        exit_code=1,
    )


if __name__ == "__main__":
    main(sys.argv[1:])
