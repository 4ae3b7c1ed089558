"""GenerationRequest: prompts and settings of all ranks, checked to be equal."""

from __future__ import annotations

import hashlib
import os
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

from zerofit.core.errors import UserError
from zerofit.generation.call_settings import CallSettings, read_settings
from zerofit.generation.gathering import each_whole
from zerofit.generation.generation_job import Gather
from zerofit.generation.lockstep import check_assistant
from zerofit.generation.model_kind import ModelKind, read_kind
from zerofit.generation.prompts import Tokens, check_lengths, check_tokens, lengths_of, read_prompts
from zerofit.ranks.exchange import Ranks

_ELEMENTS_OF_A_WEIGHT = 256
"""Elements sampled per weight. ASSUMPTION: a training step changes at least one of them over all weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationOptions:
    """The arguments of generate(), and extra ones of `zerofit generate` for its file."""

    tokenizer: Any
    max_new_tokens: int | Sequence[int] | None
    generation_config: Any = None
    batch_size: int
    per_rank: bool = False
    gather: Gather | str
    seed: int
    out: Path | None
    resume: bool
    limit_s: float
    progress: Callable[[int, int], None] | None
    settings: Mapping[str, Any] = field(default_factory=dict)
    fingerprint: str | None = None
    """Of everything that determines the results; None computes it from the request."""
    describe: Callable[[dict[str, Any]], Mapping[str, Any]] | None = None
    """Returns what `out` gets of a result's document; None for the document itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """Equal on every rank, except for this rank's own part."""

    options: GenerationOptions
    kind: ModelKind
    settings: CallSettings
    prompts: tuple[Tokens, ...]
    """Of all ranks."""
    max_new_tokens: tuple[int, ...]
    """Of each prompt."""
    batch_size: int
    gather: Gather
    own: range
    """Indices of the prompts whose results this rank gets."""

    def fingerprint(self) -> str:
        """Return a digest of everything that determines the results, for any number of ranks.

        A collective over all ranks if ZeRO-3 partitions the weights.
        """
        about = (type(self.kind.model).__name__, _weights_digest(self.kind.generator))
        how = (_settings_words(self.settings), self.batch_size, self.options.seed)
        prompts = _prompts_digest(self.prompts, self.max_new_tokens)
        return hashlib.sha256(repr((about, how, prompts)).encode()).hexdigest()


def read_request(
    ranks: Ranks, wrapped: Any, prompts: Iterable[Any], options: GenerationOptions
) -> GenerationRequest:
    """Return the request of all ranks.

    Raises:
        UserError: on every rank: something is wrong on one, or their arguments differ.
    """

    def read() -> GenerationRequest:
        kind = read_kind(wrapped)
        call = read_settings(
            kind.model, options.tokenizer, given=options.generation_config, settings=options.settings
        )
        batch_size = _batch_size(options.batch_size)
        check_assistant(call, batch_size=batch_size)
        found = read_prompts(prompts, options.tokenizer, taken=kind.inputs)
        num_known = getattr(kind.model.get_input_embeddings(), "num_embeddings", None)
        check_tokens(found, num_known=num_known)
        lengths = lengths_of(options.max_new_tokens, call.max_new_tokens, num_prompts=len(found))
        # Prompt lookup drafts tokens beyond the last one needed.
        positions = kind.positions.less(call.config.prompt_lookup_num_tokens or 0)
        check_lengths(found, lengths, positions, is_encoder_decoder=kind.is_encoder_decoder)
        return GenerationRequest(
            options=options,
            kind=kind,
            settings=call,
            prompts=found,
            max_new_tokens=lengths,
            batch_size=batch_size,
            gather=Gather(options.gather),
            own=range(len(found)),
        )

    request = ranks.agreed(read)
    return _of_all_ranks(ranks, request) if ranks.are_many else request


def _of_all_ranks(ranks: Ranks, mine: GenerationRequest) -> GenerationRequest:
    """Return the request of all ranks, after checking that theirs agree."""
    options, out = mine.options, mine.options.out
    arguments = {
        "model": _model_words(mine.kind),
        "batch_size": str(mine.batch_size),
        "per_rank": str(options.per_rank),
        "gather": str(mine.gather),
        "seed": str(options.seed),
        "out": "None" if out is None else os.path.abspath(out),
        "resume": str(options.resume),
        **_settings_words(mine.settings),
    }
    if not options.per_rank:
        arguments["prompts"] = _prompts_digest(mine.prompts, ())
        arguments["max_new_tokens"] = _describe_lengths(mine.max_new_tokens)
    by_rank, num_prompts = ranks.share(arguments), ranks.share(len(mine.prompts))
    ranks.agreed(lambda: _check_equal_arguments(by_rank, num_prompts=num_prompts))
    if not options.per_rank:
        return mine
    each = ranks.share_all(list(zip(mine.prompts, mine.max_new_tokens, strict=True)))
    begin = sum(map(len, each[: ranks.rank]))
    flat = tuple(chain.from_iterable(each))
    return replace(
        mine,
        prompts=tuple(tokens for tokens, _ in flat),
        max_new_tokens=tuple(most for _, most in flat),
        own=range(begin, begin + len(mine.prompts)),
    )


def _check_equal_arguments(each: Sequence[Mapping[str, str]], *, num_prompts: Sequence[int]) -> None:
    for rank, other in enumerate(each):
        unlike = [name for name in {**each[0], **other} if other.get(name) != each[0].get(name)]
        if "prompts" in unlike:
            raise UserError(
                "generate-prompts-differ",
                "the ranks got different prompts",
                found=f"{num_prompts[0]} on rank 0, {num_prompts[rank]} on rank {rank}, and not the same",
                why="without per_rank=True all ranks must get the same prompts, and share the work",
                fix="pass per_rank=True where each rank has its own, as from a prepared DataLoader",
            )
        if unlike:
            also_out = ": all write beside it, and rank 0 the file" if unlike[0] == "out" else ""
            raise UserError(
                "generate-ranks-differ",
                f"the ranks got different arguments: {unlike[0]}",
                found=f"{each[0].get(unlike[0])} on rank 0, and {other.get(unlike[0])} on rank {rank}",
                why="they generate together, and results must not depend on the rank",
                fix=f"pass the same {unlike[0]} on every rank{also_out}",
            )


def _model_words(kind: ModelKind) -> str:
    sizes = (getattr(each, "ds_numel", None) or each.numel() for each in kind.generator.parameters())
    how = " partitioned by ZeRO-3" if kind.is_partitioned else ""
    return f"{type(kind.model).__name__} of {sum(sizes):,} parameters{how}"


def _settings_words(settings: CallSettings) -> dict[str, str]:
    values = settings.config.to_dict()
    values.pop("transformers_version", None)
    objects = {name: type(value).__name__ for name, value in settings.objects.items()}
    criteria = [type(each).__name__ for each in settings.criteria]
    given = {name: str(value) for name, value in values.items() if value is not None}
    return {**given, **objects, "stopping_criteria": str(criteria)}


def _weights_digest(model: Any) -> str:
    """Return a digest of some elements of each weight, equal at any ZeRO stage."""
    import torch

    digest = hashlib.sha256()
    # Weights that were gathered in inference mode could never be trained again.
    with torch.inference_mode(False), torch.no_grad():
        for weight in each_whole(model):
            digest.update(f"{weight.dtype} {list(weight.shape)}".encode())
            flat = weight.detach().flatten()
            some = flat[:: max(1, len(flat) // _ELEMENTS_OF_A_WEIGHT)].contiguous().cpu()
            digest.update(some.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _prompts_digest(prompts: Iterable[Tokens], lengths: Iterable[int]) -> str:
    digest = hashlib.sha256()
    for tokens in prompts:
        digest.update(array("q", (len(tokens), *tokens)).tobytes())
    digest.update(array("q", lengths).tobytes())
    return digest.hexdigest()


def _describe_lengths(lengths: Sequence[int]) -> str:
    """Return a text that differs if the lengths do."""
    if len(set(lengths)) <= 1:
        return str(lengths[0]) if lengths else "none"
    return f"{min(lengths)} to {max(lengths)} (sha256 {_prompts_digest((), lengths)[:12]})"


def _batch_size(batch_size: int) -> int:
    if not isinstance(batch_size, int) or batch_size < 1:
        raise UserError(
            "generate-batch-size",
            "a batch has at least one prompt",
            found=f"batch_size={batch_size!r}",
            why="it is the number of prompts in one call on one rank",
            fix="pass 1 or more",
        )
    return batch_size
