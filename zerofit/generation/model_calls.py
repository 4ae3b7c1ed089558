"""Calls of model.generate on one rank: for a batch, or for a dummy that joins the others' passes."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from zerofit.generation.batching import PromptBatch
from zerofit.generation.call_settings import CallSettings, settings_disagree
from zerofit.generation.decoding import GuardedLoop, StopRecorder
from zerofit.generation.generation_job import Completion, FinishReason, Generated
from zerofit.generation.preserve_state import seed_sampling
from zerofit.generation.prompts import Tokens
from zerofit.generation.request import GenerationRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCaller:
    """The shared state of one generation's calls."""

    request: GenerationRequest
    settings: CallSettings
    in_step: bool
    """True if each rank participates in all forward passes of the others: ZeRO-3 without gathering at
    once."""
    on_token: Callable[[], None]
    """Called after each token."""

    def generate(self, batch: PromptBatch | None) -> Callable[[], list[Generated]]:
        """Generate a batch, and return a function that gives its results.

        Args:
            batch: the prompts; None participates in the forward passes of the other ranks.

        Returns:
            A function that raises errors from between two passes, to be called when all ranks have
            finished.
        """
        if batch is None:
            if self.in_step:
                self._take_part()
            return list
        prompts = [self.request.prompts[index] for index in batch.indices]
        ids, mask = self._padded(prompts)
        stops, loop = StopRecorder(self.settings.criteria, on_token=self.on_token), GuardedLoop()
        objects = self._objects(stops)
        if self.in_step:
            objects["custom_generate"] = loop
        seed_sampling(_batch_seed(self.request.options.seed, batch.number), self.request.kind.device)
        found = self._call(ids, mask, self._config(batch.max_new_tokens), **objects)
        self.on_token()  # the script's own loop may not have called a criterion

        def results() -> list[Generated]:
            loop.check()
            each = self._completions(found, batch, stops, num_prompt_tokens=ids.shape[1])
            count = self.settings.num_return_sequences
            return [
                Generated(
                    index=index,
                    num_prompt_tokens=len(prompt),
                    completions=tuple(each[place * count : (place + 1) * count]),
                )
                for place, (index, prompt) in enumerate(zip(batch.indices, prompts, strict=True))
            ]

        return results

    def rehearse(self) -> None:
        """Validate the settings by a model.generate call that makes no token.

        An encoder runs its pass: under ZeRO-3 all ranks must do this together.
        """
        if "custom_generate" in self.settings.objects:
            return
        ids, mask = self._padded([self.request.prompts[0][:1]])
        try:
            objects = self._objects(StopRecorder(self.settings.criteria, on_token=self.on_token))
            objects["custom_generate"] = lambda model, input_ids, **_: input_ids
            self._call(ids, mask, self._config(max(self.request.max_new_tokens)), **objects)
        except (TypeError, ValueError, ArithmeticError, IndexError, NotImplementedError) as error:
            raise settings_disagree(self.request.options.settings, error) from error

    def _take_part(self) -> None:
        """Participate in the forward passes of the other ranks; the output is discarded."""
        from transformers import GenerationConfig

        ids, mask = self._padded([self.request.prompts[0][:1]])
        own = self.settings.config
        config = GenerationConfig(
            max_new_tokens=1,
            do_sample=False,
            num_beams=1,
            pad_token_id=self.settings.pad_token,
            bos_token_id=own.bos_token_id,
            decoder_start_token_id=own.decoder_start_token_id,
            use_cache=own.use_cache,
            disable_compile=True,
            # Its loop checks for other ranks before its first pass; with other settings, after it.
            prompt_lookup_num_tokens=own.prompt_lookup_num_tokens,
        )
        self._call(ids, mask, config)

    def _call(self, ids: Any, mask: Any, config: Any, **objects: Any) -> Any:
        from transformers import GenerationConfig

        # Otherwise None in the settings would be replaced by the model's own, which read_settings() has
        # handled.
        kind, clean = self.request.kind, GenerationConfig()
        kind.model.generation_config = clean
        if "generation_config" in kind.generator.__dict__:
            kind.generator.generation_config = clean
        with kind.autocast():
            return kind.generator.generate(
                input_ids=ids,
                **({"attention_mask": mask} if kind.takes_mask else {}),
                generation_config=config,
                synced_gpus=self.in_step,
                **objects,
            )

    def _config(self, max_new_tokens: int) -> Any:
        config = copy.deepcopy(self.settings.config)
        config.max_new_tokens = max_new_tokens
        config.return_dict_in_generate = True  # for beams' ends
        return config

    def _objects(self, stops: StopRecorder) -> dict[str, Any]:
        """Return the further arguments of a call."""
        from transformers import LogitsProcessorList, StoppingCriteriaList

        processors = LogitsProcessorList(self.settings.objects.get("logits_processor", ()))
        own = {"logits_processor": processors, "stopping_criteria": StoppingCriteriaList([stops])}
        return {**self.settings.objects, **own}

    def _padded(self, rows: Sequence[Tokens]) -> tuple[Any, Any]:
        """Return tokens and mask of prompts: left-padded, for an encoder right-padded."""
        import torch

        kind, width = self.request.kind, max(map(len, rows))
        ids = torch.full((len(rows), width), self.settings.pad_token, dtype=torch.long)
        mask = torch.zeros((len(rows), width), dtype=torch.long)
        for place, row in enumerate(rows):
            where = slice(0, len(row)) if kind.is_encoder_decoder else slice(width - len(row), width)
            ids[place, where] = torch.tensor(row)
            mask[place, where] = 1
        return ids.to(kind.device), mask.to(kind.device)

    def _completions(
        self, found: Any, batch: PromptBatch, stops: StopRecorder, *, num_prompt_tokens: int
    ) -> list[Completion]:
        """Return each sequence of model.generate's output, cut where it ended."""
        sequences = getattr(found, "sequences", found)  # custom_generate may return these only
        rows = sequences.tolist()
        begin = 1 if self.request.kind.is_encoder_decoder else num_prompt_tokens
        of_beams = getattr(found, "beam_indices", None)
        if of_beams is None:
            ends = stops.lengths(len(rows))
            return [
                self._completion(row[begin:end], batch.max_new_tokens, is_stopped=end is not None)
                for row, end in zip(rows, ends, strict=True)
            ]
        lengths = (of_beams >= 0).sum(dim=1).tolist()  # -1 after the end
        return [
            self._completion(row[begin : begin + length], batch.max_new_tokens)
            for row, length in zip(rows, lengths, strict=True)
        ]

    def _completion(self, row: list[int], max_new_tokens: int, *, is_stopped: bool = False) -> Completion:
        eos_tokens, tokenizer = self.settings.eos_tokens, self.request.options.tokenizer
        end = next((place for place, token in enumerate(row) if token in eos_tokens), None)
        tokens = tuple(row if end is None else row[: end + 1])
        is_cut = end is None and not is_stopped and len(tokens) >= max_new_tokens
        text = None if tokenizer is None else tokenizer.decode(tokens, skip_special_tokens=True)
        return Completion(
            tokens=tokens, text=text, finish_reason=FinishReason.LENGTH if is_cut else FinishReason.STOP
        )


def _batch_seed(seed: int, number: int) -> int:
    """Return the seed of a batch: independent of the rank, and different for each batch."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{number}".encode()).digest()[:7], "big")
