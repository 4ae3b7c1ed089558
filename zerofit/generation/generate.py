"""zerofit.generate: completions of many prompts by all ranks together, for any kind of distributed model."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

from zerofit.core.plan import GENERATE_LIMIT_S
from zerofit.generation.batching import PromptBatch, make_batches, make_steps
from zerofit.generation.free_memory import working_bytes
from zerofit.generation.gathering import gathered_once, layer_by_layer, will_gather
from zerofit.generation.generation_job import Gather, Generated
from zerofit.generation.lockstep import settings_in_step, uncompiled
from zerofit.generation.model_calls import ModelCaller
from zerofit.generation.preserve_state import untouched
from zerofit.generation.request import GenerationOptions, GenerationRequest, read_request
from zerofit.generation.results import Results, open_results
from zerofit.ranks.exchange import Progress, Ranks, all_ranks
from zerofit.ranks.meeting import arranged, meet
from zerofit.ranks.script_line import script_line


def generate(
    model: Any,
    prompts: Iterable[Any],
    *,
    tokenizer: Any = None,
    max_new_tokens: int | Sequence[int] | None = None,
    generation_config: Any = None,
    batch_size: int = 8,
    per_rank: bool = False,
    gather: Gather | str = Gather.AUTO,
    seed: int = 0,
    out: str | PathLike[str] | None = None,
    resume: bool = False,
    limit_s: float = GENERATE_LIMIT_S,
    progress: Callable[[int, int], None] | None = None,
    **settings: Any,
) -> list[Generated]:
    """Return the completions of all prompts, in order; every rank calls this, and no rank waits forever.

    The model's mode, checkpointing, caches and settings, and the random states are restored at the end.

    Args:
        model: of transformers or peft, possibly wrapped by DistributedDataParallel, DeepSpeed (at any ZeRO
            stage), accelerate or torch.compile.
        prompts: texts, chats (lists of messages), token ids, or batches with "input_ids" and
            "attention_mask", each row of which is a prompt.
        tokenizer: the model's own; needed for texts and chats, and for the completions' text.
        max_new_tokens: of each completion, or one per prompt; None uses the generation settings.
        generation_config: a GenerationConfig, a mapping, or the path of a file or folder with one; None uses
            the model's own.
        batch_size: prompts per call on one rank.
        per_rank: whether each rank passes its own prompts, possibly none, and gets only their completions;
            otherwise all ranks pass the same prompts, and all get all completions.
        gather: how weights partitioned by ZeRO-3 are gathered: "always" at once for the whole call, "never"
            layer by layer for each token, "auto" at once if every rank has enough memory.
        seed: of sampling; completions don't depend on the number of ranks.
        out: a JSONL file for all completions, which are also stored on disk as they are made; None for none.
        resume: whether to continue unfinished results of the same call and weights at `out`.
        limit_s: how long to wait for a rank that does not reach this call, or, if ranks run independently,
            while none of them makes a token; 0 is unlimited. Ranks in step wait for each other up to the
            backend's own timeout.
        progress: called after each step on each rank with the prompts done, and all of them.
        **settings: of transformers' GenerationConfig, and logits_processor, stopping_criteria and the like.

    Raises:
        UserError: on every rank: a prompt, a setting or the model is not supported, or a rank did not come.
    """
    options = GenerationOptions(
        tokenizer=tokenizer,
        max_new_tokens=max_new_tokens,
        generation_config=generation_config,
        batch_size=batch_size,
        per_rank=per_rank,
        gather=gather,
        seed=seed,
        out=None if out is None else Path(out),
        resume=resume,
        limit_s=limit_s,
        progress=progress,
        settings=settings,
    )
    return generate_with(model, prompts, options)


def generate_with(model: Any, prompts: Iterable[Any], options: GenerationOptions) -> list[Generated]:
    """Do what generate() does, with options that say more about the result file."""
    ranks = all_ranks()
    if ranks.are_many:
        meet("zerofit.generate", line=script_line(), limit_s=options.limit_s)
    request = read_request(ranks, model, prompts, options)
    name = ranks.share(uuid.uuid4().hex)[0]
    beat = Progress(ranks, name=name, limit_s=options.limit_s)
    with open_results(ranks, request) as results:
        try:
            _generate(ranks, request, results, on_token=beat.on_token)
        except BaseException as error:
            beat.fail(error)
            raise
        beat.wait_for_all()
        generated = results.finish()
    beat.end()
    return generated


def _generate(
    ranks: Ranks, request: GenerationRequest, results: Results, *, on_token: Callable[[], None]
) -> None:
    """Generate this rank's prompts, in step with the others if necessary."""
    kind = request.kind
    left = [batch for batch in _batches(request) if not results.has_all(batch.indices)]
    if not left:
        return
    by_layer = kind.is_partitioned and not will_gather(
        kind.generator, request.gather, needed_bytes=_needed_bytes(request, left)
    )
    in_step = by_layer and ranks.are_many
    settings = uncompiled(request.settings) if by_layer else request.settings
    if in_step:
        settings = ranks.agreed(lambda: settings_in_step(settings, kind.model))
    caller = ModelCaller(request=request, settings=settings, in_step=in_step, on_token=on_token)
    done, total = len(request.prompts) - sum(len(batch.indices) for batch in left), len(request.prompts)
    with _prepared(caller, by_layer=by_layer):
        ranks.agreed(caller.rehearse)
        for step in make_steps(
            left,
            world_size=ranks.size,
            max_positions=kind.positions.num_tokens if in_step and not kind.is_encoder_decoder else None,
            may_differ=not (in_step and settings.has_fixed_cache),
        ):
            found = caller.generate(step[ranks.rank])
            done += sum(len(batch.indices) for batch in step if batch is not None)
            keep = partial(_store, results, found, request.options.progress, done, total)
            if in_step:
                ranks.agreed(keep)  # a rank that fails here must not leave the others waiting
            else:
                keep()


@contextmanager
def _prepared(caller: ModelCaller, *, by_layer: bool) -> Iterator[None]:
    """Prepare a model for generation; restore everything at the end."""
    kind = caller.request.kind
    if not kind.is_zero3:
        with arranged(), untouched(kind.generator, kind.model):
            yield
        return
    find_weights = layer_by_layer if by_layer else gathered_once
    with arranged(), find_weights(kind.generator), untouched(kind.generator, kind.model):
        yield


def _store(
    results: Results,
    found: Callable[[], list[Generated]],
    progress: Callable[[int, int], None] | None,
    done: int,
    total: int,
) -> None:
    results.keep(found())
    if progress is not None:
        progress(done, total)


def _batches(request: GenerationRequest) -> tuple[PromptBatch, ...]:
    lengths = list(zip(map(len, request.prompts), request.max_new_tokens, strict=True))
    return make_batches(lengths, batch_size=request.batch_size if request.kind.takes_mask else 1)


def _needed_bytes(request: GenerationRequest, batches: Sequence[PromptBatch]) -> int:
    return max(
        working_bytes(
            request.kind.model,
            num_sequences=len(batch.indices) * request.settings.num_sequences,
            num_prompt_tokens=batch.num_tokens,
            max_new_tokens=batch.max_new_tokens,
        )
        for batch in batches
    )
