"""One call of model.generate on one rank: a batch, or a dummy that takes part in the others' passes."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from zerofit.core.errors import UserError
from zerofit.generation.call_settings import CallSettings
from zerofit.generation.generation_calls import Batch
from zerofit.generation.generation_job import Completion, FinishReason
from zerofit.generation.guarded_decoding import CheckedProcessor, GuardedLoop
from zerofit.generation.model_kind import ModelKind
from zerofit.generation.preserve_state import seed_sampling
from zerofit.generation.prompts import Tokens
from zerofit.generation.stopping import Ends


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
            A function that raises what was raised between two passes, when all ranks have ended the call.
        """
        ids, mask = self._padded([prompts[index] for index in batch.indices])
        ends, loop = Ends(self.settings.criteria, go_on=self.go_on), GuardedLoop()
        objects = self._objects(ends)
        if self.in_step:
            objects["custom_generate"] = loop
        seed_sampling(_batch_seed(self.seed, batch.number), self.kind.device)
        found = self._call(ids, mask, self._config(batch.max_new_tokens), **objects)
        self.go_on()  # a generation of the script's own may have asked no criterion

        def completions() -> list[tuple[Completion, ...]]:
            loop.check()
            sequences = getattr(found, "sequences", found)  # custom_generate may return these alone
            begin = 1 if self.kind.is_encoder_decoder else ids.shape[1]
            of_beams = getattr(found, "beam_indices", None)
            if of_beams is not None:  # -1 behind the end
                lengths = (of_beams >= 0).sum(dim=1).tolist()
                each = [
                    self._completion(row[begin : begin + length], batch.max_new_tokens)
                    for row, length in zip(sequences.tolist(), lengths, strict=True)
                ]
            else:
                each = [
                    self._completion(row[begin:end], batch.max_new_tokens, is_stopped=end is not None)
                    for row, end in zip(sequences.tolist(), ends.lengths(len(sequences)), strict=True)
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
            # Its loop asks before its first pass whether others go on, that of other settings after it.
            prompt_lookup_num_tokens=own.prompt_lookup_num_tokens,
        )
        self._call(ids, mask, config)

    def rehearse(self, token: int, *, max_new_tokens: int) -> None:
        """Check the settings as model.generate does, which then makes no token.

        An encoder makes its pass: under ZeRO-3 all ranks do this together.

        Args:
            token: any that the model knows.
            max_new_tokens: of the longest completion.

        Raises:
            UserError: transformers does not take the settings.
        """
        if "custom_generate" in self.settings.objects:
            return
        ids, mask = self._padded([(token,)])
        try:
            objects = self._objects(Ends(self.settings.criteria, go_on=self.go_on))
            self._call(ids, mask, self._config(max_new_tokens), **objects, custom_generate=_no_tokens)
        except (TypeError, ValueError, ArithmeticError, IndexError, NotImplementedError) as error:
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

    def _objects(self, ends: Ends) -> dict[str, Any]:
        """Return the further arguments of a call."""
        from transformers import LogitsProcessorList, StoppingCriteriaList

        objects = dict(self.settings.objects)
        processors = objects.pop("logits_processor", ())
        # One of transformers' own stays itself: it takes the place of that which a setting asks for.
        checked = [each if _is_of_transformers(each) else CheckedProcessor(each) for each in processors]
        return {
            **objects,
            "logits_processor": LogitsProcessorList(checked),
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

    def _completion(self, row: list[int], max_new_tokens: int, *, is_stopped: bool = False) -> Completion:
        eos_tokens = self.settings.eos_tokens
        end = next((place for place, token in enumerate(row) if token in eos_tokens), None)
        tokens = tuple(row if end is None else row[: end + 1])
        is_cut = end is None and not is_stopped and len(tokens) >= max_new_tokens
        text = None if self.tokenizer is None else self.tokenizer.decode(tokens, skip_special_tokens=True)
        return Completion(
            tokens=tokens, text=text, finish_reason=FinishReason.LENGTH if is_cut else FinishReason.STOP
        )


def _no_tokens(model: Any, input_ids: Any, logits_processor: Any, **_: Any) -> Any:
    """Stand for transformers' decoding loop, when all before it has been done.

    Its logits processors look at some settings when they see scores; the script's own are left alone.
    """
    import torch

    num_tokens = model.config.get_text_config(decoder=True).vocab_size
    scores = torch.zeros((input_ids.shape[0], num_tokens), device=input_ids.device)
    for processor in filter(_is_from_settings, logits_processor):
        scores = processor(input_ids, scores)
    return input_ids


def _is_from_settings(processor: Any) -> bool:
    from transformers import PrefixConstrainedLogitsProcessor, UnbatchedClassifierFreeGuidanceLogitsProcessor

    # The first calls a function of the script's, the second the model.
    apart = PrefixConstrainedLogitsProcessor | UnbatchedClassifierFreeGuidanceLogitsProcessor
    return _is_of_transformers(processor) and not isinstance(processor, apart)


def _is_of_transformers(processor: Any) -> bool:
    return type(processor).__module__.startswith("transformers.")


def _batch_seed(seed: int, number: int) -> int:
    """Return the seed of a batch: the same on any rank, and unlike those of its neighbours."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{number}".encode()).digest()[:7], "big")
