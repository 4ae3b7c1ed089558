"""zerofit.generate: completions of many prompts by all ranks together, however the model is spread."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerofit.core.plan import GENERATE_LIMIT_S
from zerofit.generation.free_memory import working_bytes
from zerofit.generation.gathering import gathered_once, layer_by_layer, will_gather
from zerofit.generation.generation_calls import Asked, Batch, Step, make_batches, make_steps
from zerofit.generation.generation_job import Gather, Generated
from zerofit.generation.in_step import settings_in_step, uncompiled
from zerofit.generation.one_call import Caller
from zerofit.generation.preserve_state import untouched
from zerofit.generation.question import Question, check_limit, read_question
from zerofit.generation.ranks.meeting import arranged, meet
from zerofit.generation.ranks.ranks import Progress, Ranks, all_ranks
from zerofit.generation.results.results import Results, open_results
from zerofit.generation.script_lines import script_line

if TYPE_CHECKING:
    from zerofit.generation.results.parts import Document


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
    """Return the completions of all prompts, in their order; every rank calls this, and none waits for ever.

    The model is left as it was: its mode, checkpointing, caches and settings, and the random states.

    Args:
        model: of transformers or peft, as it is or wrapped by DistributedDataParallel, DeepSpeed (at any ZeRO
            stage), accelerate or torch.compile.
        prompts: texts, chats (lists of messages), token ids, or batches with "input_ids" and
            "attention_mask", each row of which is a prompt.
        tokenizer: the model's own; needed for texts and chats, and for the completions' text.
        max_new_tokens: of each completion, or one a prompt; None for what the generation settings say.
        generation_config: a GenerationConfig, a mapping, or the path of a file or folder with one; None for
            the model's own.
        batch_size: prompts in one call on one rank.
        per_rank: whether each rank gives prompts of its own, none perhaps, and gets their completions alone;
            else all give the same, and all get all.
        gather: how weights that ZeRO-3 partitioned are found: "always" gathers them once for the whole call,
            "never" layer by layer for each token, "auto" gathers where every rank has the memory for it.
        seed: of sampling; completions don't depend on the number of ranks.
        out: a JSONL file that gets all completions, which are kept on disk as they come; None for none.
        resume: whether unfinished results of the same call, with the same weights, at `out` are continued.
        limit_s: how long to wait for a rank that does not come to this call, or that makes no token where
            ranks run apart; 0 is without end. Ranks in step wait for each other by the backend's own limit.
        progress: called after each step on each rank with the prompts that are done, and all of them.
        **settings: of transformers' GenerationConfig, and logits_processor, stopping_criteria and the like.

    Raises:
        UserError: on every rank: a prompt, a setting or the model can't be served, or a rank did not come.
    """
    return generate_and_keep(
        model,
        prompts,
        tokenizer=tokenizer,
        max_new_tokens=max_new_tokens,
        generation_config=generation_config,
        batch_size=batch_size,
        per_rank=per_rank,
        gather=gather,
        seed=seed,
        out=out,
        resume=resume,
        limit_s=limit_s,
        progress=progress,
        settings=settings,
    )


def generate_and_keep(
    model: Any,
    prompts: Iterable[Any],
    *,
    out: str | PathLike[str] | None,
    resume: bool,
    limit_s: float,
    progress: Callable[[int, int], None] | None,
    fingerprint: str | None = None,
    describe: Callable[[dict[str, Any]], Document] | None = None,
    **options: Any,
) -> list[Generated]:
    """Do what generate() does, for a caller that decides what its file holds.

    Args:
        model: as generate() has it, and so are prompts, out, resume, limit_s and progress.
        prompts: the same on every rank, or this rank's.
        out: the file for all results.
        resume: whether unfinished results there are continued.
        limit_s: how long to wait for a rank.
        progress: called after each step.
        fingerprint: of all that decides about the results; None for what is known of them here.
        describe: gives what `out` gets of a result's document; None for the document as it is.
        **options: all others of generate(), and its settings as a mapping.
    """
    ranks = all_ranks()
    check_limit(limit_s)
    if ranks.are_many:
        meet("zerofit.generate", line=script_line(), limit_s=limit_s)
    question = read_question(ranks, model, prompts, out=out, resume=resume, **options)
    name = ranks.share(uuid.uuid4().hex)[0]
    beat = Progress(ranks, name=name, limit_s=limit_s)
    place = None if out is None else Path(out)
    with open_results(ranks, question, out=place, resume=resume, fingerprint=fingerprint) as results:
        try:
            _generate(ranks, question, results, go_on=beat.go_on, progress=progress)
        except BaseException as error:
            beat.fail(error)
            raise
        beat.wait_for_all("generated")
        generated = results.finish(describe)
    beat.end("generated")
    return generated


def _generate(
    ranks: Ranks,
    question: Question,
    results: Results,
    *,
    go_on: Callable[[], None],
    progress: Callable[[int, int], None] | None,
) -> None:
    """Generate what this rank is to, in step with the others where it must be."""
    batches, kind = _batches(question), question.kind
    left = [batch for batch in batches if not results.has_all(batch.indices)]
    if not left:
        return
    by_layer = kind.is_partitioned and not will_gather(
        kind.generator, question.gather, needed_bytes=_needed_bytes(question, left)
    )
    in_step = by_layer and ranks.are_many
    settings = uncompiled(question.settings) if by_layer else question.settings
    caller = Caller(
        kind=kind,
        settings=ranks.agreed(lambda: settings_in_step(settings, kind.model)) if in_step else settings,
        tokenizer=question.tokenizer,
        seed=question.seed,
        in_step=in_step,
        go_on=go_on,
    )
    done, total = len(question.prompts) - sum(len(batch.indices) for batch in left), len(question.prompts)
    with _ready(caller, by_layer=by_layer):
        longest = max(question.max_new_tokens)
        ranks.agreed(lambda: caller.rehearse(question.prompts[0][0], max_new_tokens=longest))
        for step in _steps(caller, left, ranks):
            found = _take(caller, step, ranks.rank, question)
            done += sum(len(batch.indices) for batch in step.batches if batch is not None)
            keep = partial(_keep, results, found, progress, done, total)
            if in_step:
                ranks.agreed(keep)  # a rank that fails here must not leave the others waiting
            else:
                keep()


@contextmanager
def _ready(caller: Caller, *, by_layer: bool) -> Iterator[None]:
    """Let a model generate; put everything back at the end."""
    kind = caller.kind
    with ExitStack() as contexts:
        contexts.enter_context(arranged())
        if kind.is_zero3:
            find_weights = layer_by_layer if by_layer else gathered_once
            contexts.enter_context(find_weights(kind.generator))
        contexts.enter_context(untouched(kind.generator, kind.model))
        yield


def _steps(caller: Caller, batches: Sequence[Batch], ranks: Ranks) -> tuple[Step, ...]:
    kind = caller.kind
    is_bound = caller.in_step and not kind.is_encoder_decoder
    return make_steps(
        batches,
        world_size=ranks.size,
        max_positions=kind.positions.num_tokens if is_bound else None,
        may_differ=not (caller.in_step and caller.settings.has_fixed_cache),
    )


def _take(caller: Caller, step: Step, rank: int, question: Question) -> Callable[[], list[Generated]]:
    """Generate this rank's batch of a step, or take part with nothing; return what gives the results."""
    batch = step.batches[rank]
    if batch is None:
        if caller.in_step:
            caller.take_part(question.prompts[0][0])
        return list
    completions = caller.generate(batch, question.prompts)

    def results() -> list[Generated]:
        return [
            Generated(index=index, num_prompt_tokens=len(question.prompts[index]), completions=each)
            for index, each in zip(batch.indices, completions(), strict=True)
        ]

    return results


def _keep(
    results: Results,
    found: Callable[[], list[Generated]],
    progress: Callable[[int, int], None] | None,
    done: int,
    total: int,
) -> None:
    results.keep(found())
    if progress is not None:
        progress(done, total)


def _batches(question: Question) -> tuple[Batch, ...]:
    asked = [
        Asked(index=index, num_tokens=len(tokens), max_new_tokens=most)
        for index, (tokens, most) in enumerate(zip(question.prompts, question.max_new_tokens, strict=True))
    ]
    return make_batches(asked, batch_size=question.batch_size if question.kind.takes_mask else 1)


def _needed_bytes(question: Question, batches: Sequence[Batch]) -> int:
    return max(
        working_bytes(
            question.kind.model,
            num_sequences=len(batch.indices) * question.settings.num_sequences,
            num_prompt_tokens=batch.num_tokens,
            max_new_tokens=batch.max_new_tokens,
        )
        for batch in batches
    )
