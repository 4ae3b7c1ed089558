"""What a case must give: transformers alone, in one process, each prompt by itself without padding."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from random_cases import Case, Padding, Search, Tokens
from tiny_models import make_model

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from random_cases import Prompt
    from transformers import PreTrainedModel

NEAREST = 1e-4
"""Logits (fp32, some 2 wide) that are as near as this might change places by the order of sums, which padding
and batches change: over 3,000 tokens of these models they moved by 1.4e-5 at most."""
_MAX_TRIES = 60
MODEL_FOLDER = "model"
_EXPECTED_FILE = "expected.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """A case made ready to run, and what it must give."""

    weight_seed: int
    """The weights that were taken."""
    num_near_ties: int
    """Weights that were tried before and left, as two tokens were too near each other."""
    special: dict[str, int]
    """Settings of special tokens."""
    completions: tuple[tuple[Tokens, ...], ...]
    """Of each prompt, in the order of ranks: new tokens of each completion, best first."""


def prepare(case: Case, folder: Path) -> Expected:
    """Write a case's model and what it must give into a folder, unless it is there; return it."""
    path = folder / _EXPECTED_FILE
    if not path.exists():
        model, expected = _find_weights(case)
        model.save_pretrained(folder / MODEL_FOLDER)
        half = path.with_suffix(".half")
        half.write_text(json.dumps(dataclasses.asdict(expected)))
        half.rename(path)
    return read_expected(folder)


def read_expected(folder: Path) -> Expected:
    """Return what prepare wrote."""
    document = json.loads((folder / _EXPECTED_FILE).read_text())
    completions = tuple(tuple(tuple(one) for one in some) for some in document.pop("completions"))
    return Expected(**document, completions=completions)


def _find_weights(case: Case) -> tuple[PreTrainedModel, Expected]:
    """Try one seed of the weights after the other until no two tokens are near each other."""
    for num_near_ties in range(_MAX_TRIES):
        weight_seed = case.weight_seed + 100_000 * num_near_ties
        model = make_model(case.family, is_tied=case.is_tied, weight_seed=weight_seed)
        special = _special_tokens(case, model)
        completions = _complete_all(case, model, special)
        if completions is not None:
            return model, Expected(
                weight_seed=weight_seed,
                num_near_ties=num_near_ties,
                special=special,
                completions=completions,
            )
    raise AssertionError(f"no weights without near ties in {_MAX_TRIES} tries: {case}")


def _special_tokens(case: Case, model: PreTrainedModel) -> dict[str, int]:
    """Choose the padding; for an early end, a token that the model gives early for one of the prompts."""
    special = {"pad_token_id": 0} if case.padding is Padding.OWN else {}
    if not case.ends_early or not case.all_prompts:
        return special
    prompt = case.all_prompts[case.seed % len(case.all_prompts)]
    likeliest = {**case.settings, **special, "do_sample": False, "num_return_sequences": 1}
    tokens = _alone(model, prompt, likeliest)[0][0]
    end = tokens[case.seed % 5 % len(tokens)]
    return special | {"eos_token_id": end} | ({"pad_token_id": end} if case.padding is Padding.END else {})


def _complete_all(
    case: Case, model: PreTrainedModel, special: dict[str, int]
) -> tuple[tuple[Tokens, ...], ...] | None:
    """Return every prompt's completions; None where they hang on differences that are too small."""
    if case.search is Search.SAMPLING:
        return _sample_all(case, model, special)
    found = []
    for prompt in case.all_prompts:
        completions, gap = _alone(model, prompt, {**case.settings, **special})
        if case.search is Search.BEAMS:
            shaken = (_alone(model, prompt, {**case.settings, **special}, shake=seed)[0] for seed in (1, 2))
            gap = NEAREST if all(one == completions for one in shaken) else 0.0
        if gap < NEAREST:
            return None
        found.append(completions)
    return tuple(found)


def _sample_all(
    case: Case, model: PreTrainedModel, special: dict[str, int]
) -> tuple[tuple[Tokens, ...], ...]:
    """Sample as zerofit does in one process: transformers alone draws other numbers for each prompt."""
    import zerofit

    found = zerofit.generate(
        model,
        [list(prompt.tokens) for prompt in case.all_prompts],
        max_new_tokens=[prompt.max_new_tokens for prompt in case.all_prompts],
        batch_size=case.batch_size,
        seed=case.seed,
        **case.settings,
        **special,
    )
    return tuple(tuple(tuple(one.tokens) for one in result.completions) for result in found)


def _alone(
    model: PreTrainedModel, prompt: Prompt, settings: dict[str, Any], *, shake: int | None = None
) -> tuple[tuple[Tokens, ...], float]:
    """Generate for one prompt.

    Returns:
        The new tokens of each completion, and the least difference between the best two logits of any step,
        which means nothing to beams.
    """
    import torch

    prompt_tokens = torch.tensor([prompt.tokens])
    found = model.generate(
        prompt_tokens,
        attention_mask=torch.ones_like(prompt_tokens),
        max_new_tokens=prompt.max_new_tokens,
        logits_processor=None if shake is None else [_shaken(shake)],
        output_logits=True,
        return_dict_in_generate=True,
        **settings,
    )
    start = 1 if model.config.is_encoder_decoder else len(prompt.tokens)
    end = settings.get("eos_token_id")
    completions = tuple(up_to_end(row[start:], end) for row in found.sequences.tolist())
    best = [step[0].topk(2).values.tolist() for step in found.logits]
    return completions, min(first - second for first, second in best)


def up_to_end(tokens: Sequence[int], end: int | None) -> Tokens:
    """Return the tokens up to the first that ends the sequence, with it."""
    return tuple(tokens[: tokens.index(end) + 1] if end in tokens else tokens)


def _shaken(seed: int) -> Any:
    """Return a processor that moves each score by up to NEAREST, so that what hangs on less comes out."""
    import torch

    draw = torch.Generator().manual_seed(seed)

    def shake(_: Any, scores: Any) -> Any:
        return scores + NEAREST * (2 * torch.rand(scores.shape, generator=draw) - 1)

    return shake
