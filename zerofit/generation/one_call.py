"""One call of model.generate on one rank: a batch, or a dummy that takes part in the others' passes."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from zerofit.errors import UserError
from zerofit.generated import Completion, FinishReason
from zerofit.generation.call_settings import CallSettings
from zerofit.generation.ends import Ends
from zerofit.generation.guarded import Guard
from zerofit.generation.model_kind import ModelKind
from zerofit.generation.prompts import Tokens
from zerofit.generation_calls import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """All that the calls of one generation share."""

    kind: ModelKind
    settings: CallSettings
    tokenizer: Any
    seed: int
    in_step: bool
    """Whether each rank takes part in every pass of the others: ZeRO-3, unless the weights are gathered."""
    go_on: Callable[[], None]
    """Called after each token."""

    def generate(self, batch: Batch, prompts: Sequence[Tokens]) -> Callable[[], list[tuple[Completion, ...]]]:
        """Generate, and return what gives the completions of a batch's prompts, in their order.

        Args:
            batch: what is generated.
            prompts: all prompts, of all batches.

        Returns:
            A function that raises what a function of the script's raised meanwhile, when all ranks have ended
            the call.
        """
        import torch

        ids, mask = self._padded([prompts[index] for index in batch.indices])
        guard = Guard()
        ends = Ends(self.settings.criteria, guard=guard, go_on=self.go_on)
        torch.manual_seed(_batch_seed(self.seed, batch.number))
        found = self._call(ids, mask, self._config(batch.max_new_tokens), **self._objects(guard, ends))

        def completions() -> list[tuple[Completion, ...]]:
            guard.check()
            sequences = getattr(found, "sequences", found)  # custom_generate may return these alone
            begin = 1 if self.kind.is_encoder_decoder else ids.shape[1]
            of_beams = getattr(found, "beam_indices", None)
            if of_beams is not None:  # -1 behind the end
                each_end = [begin + length for length in (of_beams >= 0).sum(dim=1).tolist()]
            else:
                each_end = ends.lengths(len(sequences))
            each = [
                self._completion(row[begin:end], batch.max_new_tokens)
                for row, end in zip(sequences.tolist(), each_end, strict=True)
            ]
            count = self.settings.num_return_sequences
            return [tuple(each[place : place + count]) for place in range(0, len(each), count)]

        return completions

    def take_part(self, token: int) -> None:
        """Take part in the forward passes of the other ranks; what comes is dropped.

        Args:
            token: any that the model knows.
        """
        from transformers import GenerationConfig

        ids, mask = self._padded([(token,)])
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
        )
        self._call(ids, mask, config)

    def rehearse(self, token: int) -> None:
        """Check the settings as model.generate does, which then makes no token.

        An encoder makes its pass: under ZeRO-3 all ranks do this together.

        Args:
            token: any that the model knows.

        Raises:
            UserError: transformers does not take the settings.
        """
        if "custom_generate" in self.settings.objects:
            return
        ids, mask = self._padded([(token,)])
        guard = Guard()
        objects = self._objects(guard, Ends(self.settings.criteria, guard=guard, go_on=self.go_on))
        try:
            self._call(ids, mask, self._config(1), **objects, custom_generate=_no_tokens)
        except (TypeError, ValueError, NotImplementedError) as error:
            raise UserError(
                "generate-settings-disagree",
                "transformers does not take these generation settings",
                found=" ".join(str(error).split()),
                why="it checks them at the beginning of each call, and this would be said of the first",
                fix="change the setting that it names",
            ) from error

    def _call(self, ids: Any, mask: Any, config: Any, **objects: Any) -> Any:
        from transformers import GenerationConfig

        # Else what is None in the settings would come from the model's own, which read_settings() has heard.
        clean = GenerationConfig()
        self.kind.model.generation_config = clean
        if "generation_config" in self.kind.generator.__dict__:
            self.kind.generator.generation_config = clean
        with self.kind.autocast():
            return self.kind.generator.generate(
                input_ids=ids,
                **({"attention_mask": mask} if self.kind.takes_mask else {}),
                generation_config=config,
                synced_gpus=self.in_step,
                **objects,
            )

    def _config(self, max_new_tokens: int) -> Any:
        config = copy.deepcopy(self.settings.config)
        config.max_new_tokens = max_new_tokens
        config.return_dict_in_generate = True  # for beams' ends
        return config

    def _objects(self, guard: Guard, ends: Ends) -> dict[str, Any]:
        """Return the further arguments of a call, in which the script's functions are guarded."""
        from transformers import LogitsProcessorList, StoppingCriteriaList

        objects = dict(self.settings.objects)
        processors = objects.pop("logits_processor", ())
        allowed = objects.pop("prefix_allowed_tokens_fn", None)
        if allowed is not None:
            objects["prefix_allowed_tokens_fn"] = guard.allowed(allowed, token=self.settings.pad_token)
        return {
            **objects,
            "logits_processor": LogitsProcessorList(guard.processors(processors)),
            "stopping_criteria": StoppingCriteriaList([ends]),
        }

    def _padded(self, rows: Sequence[Tokens]) -> tuple[Any, Any]:
        """Return tokens and mask of prompts: padded on the left, for an encoder on the right."""
        import torch

        width = max(map(len, rows))
        ids = torch.full((len(rows), width), self.settings.pad_token, dtype=torch.long)
        mask = torch.zeros((len(rows), width), dtype=torch.long)
        for place, row in enumerate(rows):
            where = slice(0, len(row)) if self.kind.is_encoder_decoder else slice(width - len(row), width)
            ids[place, where] = torch.tensor(row)
            mask[place, where] = 1
        return ids.to(self.kind.device), mask.to(self.kind.device)

    def _completion(self, row: list[int], max_new_tokens: int) -> Completion:
        eos_tokens = self.settings.eos_tokens
        end = next((place for place, token in enumerate(row) if token in eos_tokens), None)
        tokens = tuple(row if end is None else row[: end + 1])
        is_cut = end is None and len(tokens) >= max_new_tokens
        text = None if self.tokenizer is None else self.tokenizer.decode(tokens, skip_special_tokens=True)
        return Completion(
            tokens=tokens, text=text, finish_reason=FinishReason.LENGTH if is_cut else FinishReason.STOP
        )


def _no_tokens(model: Any, input_ids: Any, **_: Any) -> Any:
    """Stand for transformers' decoding loop, when all before it has been done."""
    return input_ids


def _batch_seed(seed: int, number: int) -> int:
    """Return the seed of a batch: the same on any rank, and unlike those of its neighbours."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{number}".encode()).digest()[:7], "big")
