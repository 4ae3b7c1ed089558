"""What a rank of `zerofit generate` runs, as `python -m zerofit.generation.program JOB`."""

from __future__ import annotations

import json
import sys
import time
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerofit.core.errors import UserError
from zerofit.generation.generation_job import GenerationJob, job_from_json
from zerofit.generation.loading import joined_ranks, loaded_model
from zerofit.generation.memory_errors import memory_explained
from zerofit.generation.prompt_lines import result_of
from zerofit.generation.ranks.ranks import all_ranks, all_ranks_store
from zerofit.generation.results.folder import kept_files
from zerofit.generation.results.parts import PartLines
from zerofit.generation.shown_progress import ShownProgress

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from zerofit.generation.generation_job import Generated

_LIMIT_S = 1800.0
"""How long to wait for a rank. ASSUMPTION: with weights on NVMe a token takes minutes, not half an hour; a
process group of torch waits as long on gloo, and 10 minutes on NCCL (torch/distributed/constants.py)."""
_FIXES = {
    "generate-out-of-step": "add --gather always, or leave the setting out",
    "generate-experts-apart": "add --gather always, or --zero-stage 0 where the model fits on one GPU",
    "generate-rank-silent": "see its log; the same command started again goes on where this one stopped",
    "generate-prompts-differ": "give the same --prompts on every node",
    "generate-ranks-differ": "give the same flags and files on every node",
    "generate-unknown-token": "leave out --tokenizer, or name the model's own",
}
"""What to do, in flags, where zerofit.generate names arguments, and the command line can't find it before."""
_SAID = "zerofit/generate/said-by-rank-0"
_FIRST_SAYS_WITHIN_S, _ENDS_AFTER_S = 10.0, 0.5
"""ASSUMPTION: all ranks raise it within a moment, and rank 0 prints it in far less than the second."""


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
    """Say what to do in the words of the command line, and once: what all ranks raise, rank 0 says.

    Raises:
        UserError: memory has run out, or what was raised, in those words.
        SystemExit: rank 0 says it.
    """
    try:
        with memory_explained(job):
            yield
    except UserError as error:
        error.fix = _FIXES.get(error.rule, error.fix)
        if error.is_on_every_rank:
            _let_first_say()
            if all_ranks().rank > 0:
                raise SystemExit(error.exit_code) from None
        raise


def _let_first_say() -> None:
    """Wait until rank 0 says what all raise: the first that ends has its launcher end the others."""
    ranks = all_ranks()
    if not ranks.are_many:
        return
    with suppress(RuntimeError):  # the store goes with rank 0, which has then spoken
        if ranks.rank == 0:
            all_ranks_store().set(_SAID, "1")
            return
        all_ranks_store().wait([_SAID], timedelta(seconds=_FIRST_SAYS_WITHIN_S))
        time.sleep(_ENDS_AFTER_S)


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
    prompts, fields = _read_prompts(Path(job.prompts), with_fields=is_first)
    tokenizer = AutoTokenizer.from_pretrained(
        job.tokenizer, local_files_only=True, trust_remote_code=job.trust_remote_code
    )
    earlier = frozenset(PartLines(kept_files(Path(job.out)))) if is_first else frozenset()
    with loaded_model(job) as model, ShownProgress(is_shown=is_first, num_done=len(earlier)) as progress:
        begin = time.perf_counter()
        results = generate_and_keep(
            model,
            prompts,
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
            describe=lambda document: result_of(fields[document["index"]], document),
        )
        took_s = time.perf_counter() - begin
    if is_first:
        made = [result for result in results if result.index not in earlier]
        print(summary(made, num_prompts=len(results), took_s=took_s), file=sys.stderr)


def _read_prompts(path: Path, *, with_fields: bool) -> tuple[list[list[int]], list[dict[str, Any]]]:
    """Return each prompt's tokens, and what else its line says, which rank 0 alone needs."""
    tokens: list[list[int]] = []
    fields: list[dict[str, Any]] = []
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            document = json.loads(line)
            tokens.append(document["tokens"])
            if with_fields:
                fields.append(document["fields"])
    return tokens, fields


if __name__ == "__main__":
    main(sys.argv[1:])
