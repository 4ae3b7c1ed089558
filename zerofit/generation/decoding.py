"""transformers' decoding loop, observed: where completions end, and errors that leave no rank waiting."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from typing import Any

from zerofit.core.errors import UserError
from zerofit.core.upstream.transformers import BEFORE_A_PASS, another_rank_goes_on


class StopRecorder:
    """A stopping criterion that calls others, and records where each sequence ended first.

    Tokens after the end can look like others, so the end must be recorded during generation.
    """

    def __init__(self, criteria: Sequence[Any], *, on_token: Callable[[], None]) -> None:
        self._criteria = criteria
        self._on_token = on_token
        self._lengths: Any = None

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        """Return which sequences end here; transformers calls this after each token."""
        import torch

        self._on_token()
        ended = torch.zeros(input_ids.shape[0], device=input_ids.device, dtype=torch.bool)
        for criterion in self._criteria:
            answer = criterion(input_ids, scores, **kwargs)  # a bool for each sequence, or a single one
            ended = ended | (answer.to(ended.device) if isinstance(answer, torch.Tensor) else answer)
        if self._criteria:
            if self._lengths is None or self._lengths.shape != ended.shape:
                self._lengths = torch.full_like(ended, -1, dtype=torch.long)
            self._lengths[ended & (self._lengths < 0)] = input_ids.shape[1]
        return ended

    def lengths(self, num_sequences: int) -> list[int | None]:
        """Return each sequence's length including its prompt; None if none of these criteria ended it.

        Args:
            num_sequences: in the order returned by transformers; not of beam search, which reorders them.
        """
        if self._lengths is None:
            return [None] * num_sequences
        return [length if length >= 0 else None for length in self._lengths.tolist()]


class GuardedLoop:
    """Replaces transformers' decoding loop in one call of generate, and keeps its exception for the end.

    A rank that raised in the middle of a call would never make the passes that the others wait for.
    Exceptions inside a pass, such as out of memory, are raised at once, since that rank's position is
    unknown.
    """

    def __init__(self) -> None:
        self._error: Exception | None = None

    # The parameters are named as in transformers' own loop, since transformers inspects them.
    def __call__(
        self,
        model: Any,
        input_ids: Any,
        *,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **model_kwargs: Any,
    ) -> Any:
        """Run transformers' loop; if it fails, keep making passes until all ranks have finished."""
        from transformers.generation.utils import GENERATION_MODES_MAPPING

        if generation_config.do_sample:
            logits_processor.append(_Drawable(num_beams=generation_config.num_beams or 1))
        decode = getattr(type(model), GENERATION_MODES_MAPPING[generation_config.get_generation_mode(None)])
        try:
            return decode(
                model,
                input_ids,
                logits_processor=logits_processor,
                stopping_criteria=stopping_criteria,
                generation_config=generation_config,
                synced_gpus=True,
                **model_kwargs,
            )
        except Exception as error:
            if _is_of_a_pass(error, model):
                raise
            self._error = error
        _go_on_beside(model, input_ids, model_kwargs)
        return input_ids

    def check(self) -> None:
        """Raise the loop's exception, if any."""
        if self._error is not None:
            raise self._error


class _Drawable:
    """The last logits processor: on a GPU, sampling from inf or NaN scores would crash the process."""

    def __init__(self, *, num_beams: int) -> None:
        self._num_beams = num_beams

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        best = scores.amax(dim=-1)
        # One beam may have no continuation while others do.
        bad = best.isnan() | best.isposinf() if self._num_beams > 1 else ~best.isfinite()
        if bad.any():
            raise UserError(
                "generate-nothing-to-draw",
                "no token can be sampled from the model's scores",
                found=f"the best score of a sequence is {best[bad][0].item()}",
                why="they overflow in fp16 in some models, or all tokens are forbidden",
                fix="load the model in bfloat16, or find the setting that forbids all tokens",
                exit_code=1,
            )
        return scores


def _is_of_a_pass(error: Exception, model: Any) -> bool:
    """Return True if an error was raised in a forward pass, or when the others have begun theirs."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_code.co_name in BEFORE_A_PASS:
            return True
        if frame.f_code.co_name == "_call_impl" and frame.f_locals.get("self") is model:
            return True
    return False


def _go_on_beside(model: Any, input_ids: Any, model_kwargs: dict[str, Any]) -> None:
    """Make passes of one token until all ranks have finished, which transformers checks before each."""
    first: dict[str, Any] = {"input_ids": input_ids[:, :1]}
    if model.config.is_encoder_decoder:
        names = ("encoder_outputs", "attention_mask")
        first = {"decoder_input_ids": input_ids[:, :1], **{name: model_kwargs[name] for name in names}}
    while another_rank_goes_on(model, input_ids.device):
        model(**first, use_cache=False)
