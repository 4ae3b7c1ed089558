"""Sequence parallelism: a rank runs a part of the tokens, and in attention a part of the heads on all tokens.

This is DeepSpeed's Ulysses (https://arxiv.org/abs/2309.14509). Training
(training/setup/deepspeed/sequence_shards.py) and the tracer (models/trace/parts.py) use the same code, so
that estimates describe what runs.
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
"""The ignored label (ignore_index of torch.nn.functional.cross_entropy)."""
_PADDING = {"labels": IGNORED, "shift_labels": IGNORED}
_UNSUPPORTED_ATTENTION = ("eager", "flex_attention")
"""Implementations that can't use masks of the whole sequence: eager is each model's own function."""


class Peers(Protocol):
    """Collectives over the ranks of a sequence-parallel group."""

    size: int
    """Number of ranks."""
    rank: int
    """This rank's index in the group."""

    def all_gather(self, own: Any) -> list[Any]:
        """Return each rank's tensor, without gradients."""

    def all_to_all(self, parts: Any) -> Any:
        """Send each rank its part along dimension 0, and return those received, without gradients."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Whole:
    """Properties of the whole batch that attention needs while a rank runs its part."""

    length: int
    """Tokens per sample over all ranks, including padding."""
    attention_mask: Any
    """Of the whole length; None if no token is masked."""
    packed: Any
    """The index of each token's document; None for one document per row."""


class SequenceShards:
    """One model whose forward passes are split over a sequence-parallel group.

    Args:
        model: of transformers, with or without adapters.
        peers: the ranks of the group.

    Raises:
        UserError: its attention is not supported.
    """

    def __init__(self, model: Any, peers: Peers) -> None:
        self._model, self._peers = model, peers
        self._size, self._rank = peers.size, peers.rank
        self._whole: _Whole | None = None
        config = getattr(model, "config", None)
        if config is None or not hasattr(config, "get_text_config"):
            raise self._refused("it is not a transformers model")
        self._config = config.get_text_config()
        heads = getattr(self._config, "num_attention_heads", None)
        if not heads or not getattr(self._config, "is_causal", True):
            raise self._refused("it has no causal attention")
        implementation = attention_of(self._config)
        if implementation in _UNSUPPORTED_ATTENTION:
            raise UserError(
                "sequence-parallel-attention",
                "this attention can't be split over the ranks of a group",
                found=f"attn_implementation={implementation} over {self._size} sequence-parallel ranks",
                why="its masks only cover the tokens of one rank",
                fix='load the model with attn_implementation="sdpa" or a flash attention',
            )
        if heads % self._size:
            raise UserError(
                "sequence-parallel-heads",
                "the number of attention heads is not divisible by the size of a group",
                found=f"{heads} attention heads over {self._size} sequence-parallel ranks",
                why="inside attention each rank has whole heads, for all tokens",
                fix=f"set --sequence-parallel-size to a divisor of {heads}",
            )
        self._originals = implementation, self._register(implementation)

    def unregister(self) -> None:
        """Restore the implementation's original attention and masks, for all models."""
        from transformers import AttentionInterface, AttentionMaskInterface

        implementation, (attend, mask) = self._originals
        AttentionInterface.register(implementation, attend)
        AttentionMaskInterface.register(implementation, mask)

    def inputs_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of a forward pass by name."""
        inputs = inspect.signature(self._model.forward).bind(*args, **kwargs).arguments
        return {**inputs, **inputs.pop("kwargs", {})}

    def forward(self, run: Any, inputs: dict[str, Any]) -> Any:
        """Return the model's outputs for a whole batch, with the loss over all tokens, and whole logits.

        In training with labels only this rank's logits are returned: whole ones would be the largest tensor.

        Args:
            run: the model's own forward pass.
            inputs: its arguments by name, for whole samples.
        """
        import torch

        part, length = self._part(inputs)
        with self._sharing(inputs):
            outputs = run(**part)
        if "labels" in part:
            outputs["loss"] = torch.stack(self._gathered(outputs["loss"])).sum()
        if outputs.get("logits") is not None and not ("labels" in part and torch.is_grad_enabled()):
            outputs["logits"] = torch.cat(self._gathered(outputs["logits"]), dim=1)[:, :length]
        return outputs

    def _refused(self, why: str) -> UserError:
        return UserError(
            "sequence-parallel-model",
            "this model doesn't support sequence parallelism",
            found=f"{type(self._model).__name__} over {self._size} sequence-parallel ranks",
            why=why,
            fix="train without sequence parallelism",
        )

    def _part(self, inputs: dict[str, Any]) -> tuple[dict[str, Any], int]:
        """Return this rank's part of a batch, and the length of whole samples."""
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
                raise self._refused(f"its labels of shape {tuple(labels.shape)} are not one per token")
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
        """Return this rank's part of a tensor of shape (samples, tokens, ...), padded to equal parts."""
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
        """Provide the properties of the whole batch to attention inside."""
        import torch
        from transformers.masking_utils import find_packed_sequence_indices

        tokens = inputs["input_ids"] if inputs.get("input_ids") is not None else inputs["inputs_embeds"]
        mask, positions = inputs.get("attention_mask"), inputs.get("position_ids")
        missing = -tokens.shape[1] % self._size
        packed = None
        uses_cache = inputs.get("use_cache")
        uses_cache = getattr(self._config, "use_cache", False) if uses_cache is None else uses_cache
        # As transformers does for whole samples (masking_utils.py, _preprocess_mask_arguments).
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

    def _gathered(self, own: Any) -> list[Any]:
        """Return each rank's tensor; gradients only flow to this rank's own."""
        tensors = self._peers.all_gather(own.detach().contiguous())
        tensors[self._rank] = own
        return tensors

    def _register(self, implementation: str) -> tuple[Any, Any]:
        """Replace an attention implementation and its masks for the modules of this model.

        Returns:
            The originals.
        """
        from transformers import AttentionInterface, AttentionMaskInterface

        attend, mask = AttentionInterface()[implementation], AttentionMaskInterface()[implementation]
        own = weakref.WeakSet(self._model.modules())

        def attention(
            module: Any, query: Any, key: Any, value: Any, attention_mask: Any, *args: Any, **kwargs: Any
        ) -> Any:
            # A recomputed block does the same as in its first run; generate() runs whole samples.
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
        """Return the outputs of attention over all tokens for this rank's tokens.

        Args:
            attend: transformers' implementation.
            module: the attention layer.
            states: queries, keys and values of this rank's tokens: (samples, heads, tokens, head size).
        """
        import torch

        query, key, value = states
        groups = query.shape[1] // key.shape[1]
        # Key and value heads are repeated until each rank has the same number.
        repeats = next(
            n for n in range(1, groups + 1) if groups % n == 0 and key.shape[1] * n % self._size == 0
        )
        key, value = (tensor.repeat_interleave(repeats, dim=1) for tensor in (key, value))
        if kwargs.get("position_ids") is not None:
            kwargs["position_ids"] = torch.cat(self._gathered(kwargs["position_ids"]), dim=-1)
        own = getattr(module, "num_key_value_groups", None)
        try:
            if own is not None:
                module.num_key_value_groups = groups // repeats
            query, key, value = (self._exchange(tensor) for tensor in (query, key, value))
            output, _ = attend(module, query, key, value, *args, **kwargs)
        finally:
            if own is not None:
                module.num_key_value_groups = own
        return self._exchange(output), None

    def _exchange(self, tensor: Any) -> Any:
        """Send each rank its part of dimension 1, and concatenate those received along dimension 2."""
        import torch

        parts = torch.stack(tensor.chunk(self._size, dim=1))
        return torch.cat(_all_to_all()(parts, self._peers).unbind(), dim=2)


@functools.cache
def _all_to_all() -> Any:
    """Return a differentiable all-to-all along dimension 0; torch 2.13 deprecates torch.distributed.nn's."""
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
