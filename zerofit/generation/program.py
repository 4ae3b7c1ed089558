"""The program of each rank of `zerofit generate`: `python -m zerofit.generation.program JOB`."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerofit.core.errors import UserError, first_line
from zerofit.core.upstream.checkpoint_pickles import UNTRUSTED
from zerofit.generation.generation_job import GenerationJob, job_from_json
from zerofit.generation.loading import is_out_of_memory, joined_ranks, load_model
from zerofit.generation.results import kept_results
from zerofit.ranks.exchange import all_ranks

if TYPE_CHECKING:
    from zerofit.generation.generation_job import Generated

_LIMIT_S = 1800.0
"""How long to wait for a rank. ASSUMPTION: with weights on NVMe a token takes minutes, not half an hour;
torch's process groups wait that long on gloo, and 10 minutes on NCCL (torch/distributed/constants.py)."""
_FIXES = {
    "generate-out-of-step": "add --gather always, or leave the setting out",
    "generate-experts-apart": "add --gather always, or --zero-stage 0 where the model fits on one GPU",
    "generate-rank-silent": "see its log; the same command resumes where this one stopped",
    "generate-prompts-differ": "give the same --prompts on every node",
    "generate-ranks-differ": "give the same flags and files on every node",
    "generate-unknown-token": "leave out --tokenizer, or name the model's own",
    UNTRUSTED: "name a model with weights in safetensors; if you trust this one, load it in Python with "
    "weights_only=False and save it by save_pretrained()",
}
"""Fixes with command-line flags, for errors of zerofit.generate() whose own fix names its arguments."""
_FIRST_SAYS_WITHIN_S = 1.0
"""ASSUMPTION: all ranks raise a common error at about the same time, and rank 0 prints it in less."""
_LINE_EVERY_S = 30.0
"""ASSUMPTION: often enough to see progress, rarely enough to keep the log short."""


def main(arguments: Sequence[str]) -> None:
    """Run a generation job together with all ranks."""
    (job_file,) = arguments
    job = job_from_json(Path(job_file).read_text(encoding="utf-8"))
    with joined_ranks(job), explained(job):
        _run(job)


@contextmanager
def explained(job: GenerationJob, *, is_loading: bool = False) -> Iterator[None]:
    """Reword errors for the command line; if all ranks raise the same one, only rank 0 prints it."""
    import torch

    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        is_of_gpu = isinstance(error, torch.OutOfMemoryError)
        raise _out_of_memory(job, error, is_of_gpu=is_of_gpu, is_loading=is_loading) from None
    except UserError as error:
        error.fix = _FIXES.get(error.rule, error.fix)
        if error.is_on_every_rank and all_ranks().rank > 0:
            time.sleep(_FIRST_SAYS_WITHIN_S)  # rank 0 prints it; the first exit ends all ranks
            raise SystemExit(error.exit_code) from None
        raise


def _out_of_memory(job: GenerationJob, error: Exception, *, is_of_gpu: bool, is_loading: bool) -> UserError:
    why = "the weights, the KV cache of a call's prompts and the activations did not fit together"
    if is_loading:
        place = "the GPU's" if is_of_gpu else "the host's"
        why = f"{place} memory is too small for this rank's weights beside its other contents"
    prompts = f"{job.batch_size} prompt{'s' if job.batch_size > 1 else ''} per call"
    return UserError(
        "generate-out-of-memory",
        "out of memory",
        found=f"{'loading the weights' if is_loading else prompts}: {first_line(error)}",
        why=why,
        fix=_memory_fix(job, is_of_gpu=is_of_gpu, is_loading=is_loading),
        exit_code=1,
    )


def _memory_fix(job: GenerationJob, *, is_of_gpu: bool, is_loading: bool) -> str:
    again, goes_on = "start it again with", "it resumes where it stopped"
    if job.batch_size > 1 and not is_loading:
        smaller = f"{again} --batch-size {job.batch_size // 2}"
        if not job.generation.get("do_sample"):
            return f"{smaller}: {goes_on}"
        # The batch determines the seed: with another size, new tokens would not match the existing ones.
        return f"{smaller}, and another --out: other batches sample other tokens"
    config = json.loads(Path(job.deepspeed).read_text(encoding="utf-8")) if job.deepspeed else {}
    offload = config.get("zero_optimization", {}).get("offload_param", {}).get("device", "none")
    if is_of_gpu and offload == "none":
        return f"{again} --param-offload cpu: {goes_on}"
    if offload == "cpu":
        return f"{again} --param-offload nvme and --nvme-path DIR: {goes_on}"
    if is_loading:
        return "end other processes, or use fewer ranks with --num-processes, or a smaller --dtype"
    return f"{again} a smaller --max-new-tokens, or with shorter prompts"


def summary(made: Sequence[Generated], *, num_prompts: int, took_s: float) -> str:
    """Return the last line: how much was generated, and how fast."""
    num_tokens = sum(len(completion.tokens) for result in made for completion in result.completions)
    of_all = "" if len(made) == num_prompts else f" (of {num_prompts}; the others were done before)"
    prompts = f"{len(made)} prompt{'s' if len(made) != 1 else ''}{of_all}"
    rate = num_tokens / took_s
    return f"zerofit: {prompts}, {num_tokens} new tokens in {took_s:.1f} s: {rate:.1f} tokens/s"


def shown_progress(*, is_shown: bool, every_s: float = _LINE_EVERY_S) -> Callable[[int, int], None]:
    """Return a function that prints from time to time how many prompts are done."""
    said_at = time.monotonic()

    def show(done: int, total: int) -> None:
        nonlocal said_at
        if is_shown and time.monotonic() - said_at >= every_s:
            said_at = time.monotonic()
            print(f"zerofit: {done} of {total} prompts are done", file=sys.stderr, flush=True)

    return show


def _run(job: GenerationJob) -> None:
    """Load the model, generate, and report the time."""
    from torch import distributed
    from transformers import AutoTokenizer, logging

    from zerofit.generation.generate import generate_with
    from zerofit.generation.request import GenerationOptions

    is_first = not distributed.is_initialized() or distributed.get_rank() == 0
    if not (is_first and sys.stderr.isatty()):
        logging.disable_progress_bar()  # of loading weights
    prompts, fields = _read_prompts(Path(job.prompts), with_fields=is_first)
    tokenizer = AutoTokenizer.from_pretrained(
        job.tokenizer, local_files_only=True, trust_remote_code=job.trust_remote_code
    )
    earlier = kept_results(Path(job.out)).lines if is_first else {}
    with explained(job, is_loading=True):
        model = load_model(job)
    begin = time.perf_counter()
    options = GenerationOptions(
        tokenizer=tokenizer,
        max_new_tokens=job.max_new_tokens,
        batch_size=job.batch_size,
        gather=job.gather,
        seed=job.seed,
        out=Path(job.out),
        resume=True,
        limit_s=_LIMIT_S,
        progress=shown_progress(is_shown=is_first),
        settings=job.generation,
        fingerprint=job.fingerprint,
        describe=lambda document: result_of(fields[document["index"]], document),
    )
    results = generate_with(model, prompts, options)
    if is_first:
        made = [result for result in results if result.index not in earlier]
        took_s = time.perf_counter() - begin
        print(summary(made, num_prompts=len(results), took_s=took_s), file=sys.stderr)


def result_of(fields: dict[str, Any], document: dict[str, Any]) -> dict[str, Any]:
    """Return a line of the results: all fields of the prompt's line, and its completions."""
    completions = [
        {name: completion[name] for name in ("text", "finish_reason", "num_new_tokens")}
        for completion in document["completions"]
    ]
    return {**fields, "completions": completions}


def _read_prompts(path: Path, *, with_fields: bool) -> tuple[list[list[int]], list[dict[str, Any]]]:
    """Return each prompt's tokens, and the other fields of its line, which only rank 0 needs."""
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
