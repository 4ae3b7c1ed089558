"""Models run in parts of a sequence: a rank has some of the tokens, and its share of the heads sees them all.

This is DeepSpeed's Ulysses (https://arxiv.org/abs/2309.14509). The ranks of a run share samples by it
(training/deepspeed/sequence_shards.py), and the tracer runs the first rank's part by the same code
(models/trace/parts.py), so that what is estimated is what runs.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from zerofit.core.errors import UserError
from zerofit.core.upstream.torch import is_in_backward
from zerofit.core.upstream.transformers import attention_of, of_whole_sequence

if TYPE_CHECKING:
    from collections.abc import Iterator

IGNORED = -100
"""Label without a loss (torch.nn.functional.cross_entropy, ignore_index of transformers)."""
_PADDING = {"labels": IGNORED, "shift_labels": IGNORED}
_UNKNOWN_MASKS = ("eager", "flex_attention")
"""Implementations that can't be given masks of the whole sequence: eager is each model's own function."""


class Peers(Protocol):
    """The ranks that share samples, as one of them sees them."""

    size: int
    """How many they are."""
    rank: int
    """Which of them this one is."""

    def all_gather(self, own: Any) -> list[Any]:
        """Return a tensor of each rank, in new memory; no gradients pass."""

    def all_to_all(self, parts: Any) -> Any:
        """Send each rank its part along dimension 0, and return the parts for this one; no gradients pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Whole:
    """What attention needs to know of the whole batch, while a rank runs its part."""

    length: int
    """Tokens of a sample with padding, over all ranks of the group."""
    attention_mask: Any
    """1 for each token that counts, of the whole length; None where all do."""
    packed: Any
    """The number of the document that each token is of; None for one a row."""


class SequenceShards:
    """One model whose forward passes are shared by a sequence-parallel group.

    Args:
        model: of transformers, adapters or not.
        peers: the ranks that share a sample.

    Raises:
        UserError: its attention can't be shared out.
    """

    def __init__(self, model: Any, peers: Peers) -> None:
        self._model, self._peers = model, peers
        self._size, self._rank = peers.size, peers.rank
        self._whole: _Whole | None = None
        config = getattr(model, "config", None)
        if config is None or not hasattr(config, "get_text_config"):
            raise self._refused("it is no model of transformers")
        self._config = config.get_text_config()
        heads = getattr(self._config, "num_attention_heads", None)
        if not heads or not getattr(self._config, "is_causal", True):
            raise self._refused("it has no causal attention")
        implementation = attention_of(self._config)
        if implementation in _UNKNOWN_MASKS:
            raise UserError(
                "sequence-parallel-attention",
                "this attention can't be shared by the ranks of a group",
                found=f"attn_implementation={implementation} over {self._size} sequence-parallel ranks",
                why="its masks are made for the tokens of one rank",
                fix='load the model with attn_implementation="sdpa" or a flash attention',
            )
        if heads % self._size:
            raise UserError(
                "sequence-parallel-heads",
                "the heads don't divide over the ranks of a group",
                found=f"{heads} attention heads over {self._size} sequence-parallel ranks",
                why="inside attention each rank has whole heads, of all tokens",
                fix=f"take a --sequence-parallel-size that divides {heads}",
            )
        self._own = implementation, self._take_over(implementation)

    def let_go(self) -> None:
        """Put the implementation's own attention and masks back, for all models."""
        from transformers import AttentionInterface, AttentionMaskInterface

        implementation, (attend, mask) = self._own
        AttentionInterface.register(implementation, attend)
        AttentionMaskInterface.register(implementation, mask)

    def inputs_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of a call of the model by name."""
        inputs = inspect.signature(self._model.forward).bind(*args, **kwargs).arguments
        return {**inputs, **inputs.pop("kwargs", {})}

    def forward(self, run: Any, inputs: dict[str, Any]) -> Any:
        """Return what a model returns for a batch: the loss of all its tokens, and whole logits.

        Where a loss is trained, logits stay the rank's own part: they would be the largest tensor of all.

        Args:
            run: the model's own forward pass.
            inputs: its arguments by name, whole.
        """
        import torch

        part, length = self._part(inputs)
        with self._sharing(inputs):
            outputs = run(**part)
        if "labels" in part:
            outputs["loss"] = torch.stack(self._of_all(outputs["loss"])).sum()
        if outputs.get("logits") is not None and not ("labels" in part and torch.is_grad_enabled()):
            outputs["logits"] = torch.cat(self._of_all(outputs["logits"]), dim=1)[:, :length]
        return outputs

    def _refused(self, why: str) -> UserError:
        return UserError(
            "sequence-parallel-model",
            "this model can't be trained in parts of a sequence",
            found=f"{type(self._model).__name__} over {self._size} sequence-parallel ranks",
            why=why,
            fix="train without sequence parallelism",
        )

    def _part(self, inputs: dict[str, Any]) -> tuple[dict[str, Any], int]:
        """Return this rank's part of a batch, and the length of the whole."""
        import torch

        inputs = {name: value for name, value in inputs.items() if value is not None}
        tokens = inputs["input_ids"] if "input_ids" in inputs else inputs["inputs_embeds"]
        rows, length = tokens.shape[:2]
        inputs["use_cache"] = False
        if "position_ids" not in inputs:
            inputs["position_ids"] = torch.arange(length, device=tokens.device).repeat(rows, 1)
        if "attention_mask" not in inputs:
            inputs["attention_mask"] = torch.ones(rows, length, dtype=torch.long, device=tokens.device)
        labels = inputs.get("labels")
        if labels is not None:
            if labels.shape != (rows, length):
                raise self._refused(f"its labels are {tuple(labels.shape)}, and not one for each token")
            if "shift_labels" not in inputs:
                inputs["shift_labels"] = torch.nn.functional.pad(labels, (0, 1), value=IGNORED)[:, 1:]
            if "num_items_in_batch" not in inputs:
                inputs["num_items_in_batch"] = inputs["shift_labels"].ne(IGNORED).sum()
        is_cut = {
            name: torch.is_tensor(value) and value.dim() > 1 and tuple(value.shape[:2]) == (rows, length)
            for name, value in inputs.items()
        }
        return {
            name: self._cut(name, value) if is_cut[name] else value for name, value in inputs.items()
        }, length

    def _cut(self, name: str, tensor: Any) -> Any:
        """Return this rank's part of a tensor of (samples, tokens, ...), padded to equal parts."""
        import torch

        missing = -tensor.shape[1] % self._size
        if missing and name == "position_ids":
            beyond = torch.arange(1, missing + 1, device=tensor.device)
            tensor = torch.cat([tensor, tensor[:, -1:] + beyond], dim=1)
        elif missing:
            padding = (0, 0) * (tensor.dim() - 2) + (0, missing)
            tensor = torch.nn.functional.pad(tensor, padding, value=_PADDING.get(name, 0))
        return tensor.chunk(self._size, dim=1)[self._rank].contiguous()

    @contextlib.contextmanager
    def _sharing(self, inputs: dict[str, Any]) -> Iterator[None]:
        """Let attention inside know the whole batch."""
        import torch
        from transformers.masking_utils import find_packed_sequence_indices

        tokens = inputs["input_ids"] if inputs.get("input_ids") is not None else inputs["inputs_embeds"]
        mask, positions = inputs.get("attention_mask"), inputs.get("position_ids")
        missing = -tokens.shape[1] % self._size
        packed = None
        uses_cache = inputs.get("use_cache")
        uses_cache = getattr(self._config, "use_cache", False) if uses_cache is None else uses_cache
        # As transformers does with whole samples (masking_utils.py, _preprocess_mask_arguments).
        if mask is None and positions is not None and not uses_cache:
            beyond = positions[:, -1:] + torch.arange(1, missing + 1, device=positions.device)
            packed = find_packed_sequence_indices(torch.cat([positions, beyond], dim=1))
        if mask is not None and mask.dim() == 2:
            mask = torch.nn.functional.pad(mask, (0, missing)).bool()
        self._whole = _Whole(length=tokens.shape[1] + missing, attention_mask=mask, packed=packed)
        try:
            yield
        finally:
            self._whole = None

    def _of_all(self, own: Any) -> list[Any]:
        """Return a tensor of each rank of the group; gradients reach this rank's own alone."""
        tensors = self._peers.all_gather(own.detach().contiguous())
        tensors[self._rank] = own
        return tensors

    def _take_over(self, implementation: str) -> tuple[Any, Any]:
        """Put this group's attention and masks in the place of an implementation's in this model.

        Returns:
            What was there.
        """
        from transformers import AttentionInterface, AttentionMaskInterface

        attend, mask = AttentionInterface()[implementation], AttentionMaskInterface()[implementation]
        own = weakref.WeakSet(self._model.modules())

        def attention(
            module: Any, query: Any, key: Any, value: Any, attention_mask: Any, *args: Any, **kwargs: Any
        ) -> Any:
            # A block that is computed again does as it did first; generate() runs whole samples.
            if module in own and not is_in_backward():
                module._zerofit_shares = self._whole is not None
            if module not in own or not module._zerofit_shares:
                return attend(module, query, key, value, attention_mask, *args, **kwargs)
            return self._attention(attend, module, (query, key, value), attention_mask, *args, **kwargs)

        def whole_mask(*args: Any, **kwargs: Any) -> Any:
            if (whole := self._whole) is not None:
                kwargs = of_whole_sequence(
                    kwargs, length=whole.length, attention_mask=whole.attention_mask, packed=whole.packed
                )
            return mask(*args, **kwargs)

        AttentionInterface.register(implementation, attention)
        AttentionMaskInterface.register(implementation, whole_mask)
        return attend, mask

    def _attention(
        self, attend: Any, module: Any, states: tuple[Any, Any, Any], *args: Any, **kwargs: Any
    ) -> tuple[Any, None]:
        """Return the attention of all tokens to all tokens, for this rank's tokens.

        Args:
            attend: an implementation of transformers.
            module: the layer it is of.
            states: queries, keys and values of this rank's tokens: (samples, heads, tokens, size of a head).
        """
        import torch

        query, key, value = states
        groups = query.shape[1] // key.shape[1]
        # Heads of keys and values are repeated until each rank has as many.
        repeats = next(
            n for n in range(1, groups + 1) if groups % n == 0 and key.shape[1] * n % self._size == 0
        )
        key, value = (one.repeat_interleave(repeats, dim=1) for one in (key, value))
        if kwargs.get("position_ids") is not None:
            kwargs["position_ids"] = torch.cat(self._of_all(kwargs["position_ids"]), dim=-1)
        own = getattr(module, "num_key_value_groups", None)
        try:
            if own is not None:
                module.num_key_value_groups = groups // repeats
            query, key, value = (self._exchange(one) for one in (query, key, value))
            output, _ = attend(module, query, key, value, *args, **kwargs)
        finally:
            if own is not None:
                module.num_key_value_groups = own
        return self._exchange(output), None

    def _exchange(self, tensor: Any) -> Any:
        """Send each rank its part of dimension 1, and return the parts of all along dimension 2."""
        import torch

        parts = torch.stack(tensor.chunk(self._size, dim=1))
        return torch.cat(_all_to_all()(parts, self._peers).unbind(), dim=2)


@functools.cache
def _all_to_all() -> Any:
    """Return a function of parts (one for each rank, along dimension 0) and peers: the parts for this rank.

    torch.distributed.nn has one, which torch 2.13 says will go.
    """
    import torch

    class AllToAll(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(context: Any, parts: Any, peers: Peers) -> Any:
            context.peers = peers
            return peers.all_to_all(parts)

        @staticmethod
        def backward(context: Any, gradients: Any) -> tuple[Any, None]:
            return AllToAll.apply(gradients.contiguous(), context.peers), None

    return AllToAll.apply
