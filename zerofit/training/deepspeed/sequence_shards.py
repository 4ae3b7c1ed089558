"""Sequence-parallel groups: each rank runs its part of the tokens, and its share of the heads sees them all.

This is DeepSpeed's Ulysses (https://arxiv.org/abs/2309.14509) with the engine's own groups, which sum the
gradients of the parts. Its classes for transformers are not used: they cut batches before the script has
them, so that a loop must compute its loss by itself, and they drop attention masks, so that padding on the
left, sliding windows and packed samples come out wrong without an error (deepspeed 0.19.8,
runtime/sequence_parallel/ulysses_sp.py). Here the engine's forward pass cuts, and what the script gives it
and gets from it is whole.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from zerofit.core.errors import UserError
from zerofit.core.upstream.deepspeed import sequence_groups
from zerofit.core.upstream.torch import is_in_backward
from zerofit.core.upstream.transformers import attention_of, of_whole_sequence
from zerofit.training.micro_batches.random_state import devices_of, unchanged_random_state
from zerofit.training.micro_batches.separability import evaluation_mode
from zerofit.training.wrapping import wrap

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

    from zerofit.training.changes import Changes
    from zerofit.training.settings import AppliedSettings

_IGNORED = -100
"""Label without a loss (torch.nn.functional.cross_entropy, ignore_index of transformers)."""
_PADDING = {"labels": _IGNORED, "shift_labels": _IGNORED}
_UNKNOWN_MASKS = ("eager", "flex_attention")
"""Implementations that can't be given masks of the whole sequence: eager is each model's own function."""
_SAME = {"float32": 1e-3, "float64": 1e-3}
_SAME_IN_HALF = 5e-2
"""Difference of logits, relative to their size, that rounding explains. ASSUMPTION: a model that attends to
its own part alone, or counts positions from the part's start, differs by more."""


def install(accelerator_class: Any, settings: AppliedSettings, changes: Changes) -> None:
    """Hook the constructor: tell accelerate which ranks take the same batches."""
    size = settings.sequence_parallel_size
    if size == 1:
        return

    def init(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        from torch.distributed.device_mesh import init_device_mesh

        original(self, *args, **kwargs)
        _check_own(self.parallelism_config, size)
        if not hasattr(self.state, "ds_device_mesh"):
            # What shares samples is "tp" to accelerate under DeepSpeed (data_loader.py, prepare_data_loader).
            shape = settings.plan.topology.data_parallel_size, size
            self.state.ds_device_mesh = init_device_mesh(self.device.type, shape, mesh_dim_names=("dp", "tp"))

    wrap(accelerator_class, "__init__", init)


def install_in_deepspeed(module: ModuleType, settings: AppliedSettings, changes: Changes) -> None:
    """Let an engine have the groups, over which it sums gradients and partitions what ZeRO partitions.

    Of the groups that its configuration can name (data_parallel_size beside sequence_parallel_size), it takes
    the data-parallel ones for both, and never adds the parts' gradients (0.19.8, utils/groups.py,
    _get_sequence_data_parallel_group).

    Args:
        module: deepspeed.
    """

    def initialize(original: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("mpu") is None:
            kwargs["mpu"] = sequence_groups(settings.sequence_parallel_size)
        return original(*args, **kwargs)

    if settings.sequence_parallel_size > 1:
        wrap(module, "initialize", initialize)


def install_in_engine(module: ModuleType, settings: AppliedSettings, changes: Changes) -> None:
    """Hook the engine's forward pass.

    Args:
        module: deepspeed.runtime.engine.
    """

    def forward(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        shards = self.__dict__.get("_zerofit_shards")
        if shards is None:
            shards = Shards(self.module, group=self.seq_parallel_group)
            self.__dict__["_zerofit_shards"] = shards
            shards.check(lambda **inputs: original(self, **inputs))
        inputs = inspect.signature(self.module.forward).bind(*args, **kwargs).arguments
        inputs |= inputs.pop("kwargs", {})
        return shards.forward(lambda **part: original(self, **part), inputs)

    if settings.sequence_parallel_size > 1:
        wrap(module.DeepSpeedEngine, "forward", forward)


def _check_own(config: Any, size: int) -> None:
    """Check that no script brings a parallelism of its own."""
    if config is not None and config.non_data_parallel_size > 1:
        raise UserError(
            "sequence-parallel-by-script",
            "the script brings a parallelism of its own",
            found=f"{size} sequence-parallel ranks, and a ParallelismConfig with tp_size={config.tp_size}, "
            f"cp_size={config.cp_size}, sp_size={config.sp_size}",
            why="each would cut what the other has cut already",
            fix="leave out one of the two",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Whole:
    """What attention needs to know of the whole batch, while a rank runs its part."""

    length: int
    """Tokens of a sample with padding, over all ranks of the group."""
    attention_mask: Any
    """1 for each token that counts, of the whole length; None where all do."""
    packed: Any
    """The number of the document that each token is of; None for one a row."""


class Shards:
    """One model whose forward passes are shared by a sequence-parallel group.

    Args:
        model: of transformers, adapters or not.
        group: the ranks that share a sample, in their order.

    Raises:
        UserError: its attention can't be shared out.
    """

    def __init__(self, model: Any, *, group: Any) -> None:
        import torch.distributed as dist

        self._model, self._group = model, group
        self._size, self._rank = dist.get_world_size(group), dist.get_rank(group)
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
        self._take_over(implementation)

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

    def check(self, run: Any) -> None:
        """Check on a few tokens that the model computes in parts what it computes whole.

        What mixes tokens elsewhere than in attention (recurrent layers, convolutions), takes positions from
        the place in its input or has another loss than the next token's would train something else.

        Raises:
            UserError: it does not.
        """
        import torch

        length = 4 * self._size - 1  # with padding, and a few tokens for each rank
        device = next(iter(devices_of(self._model)))
        tokens = torch.arange(2 * length, device=device).view(2, length) * 7 % self._config.vocab_size
        mask = torch.ones_like(tokens)
        mask[1, -3:] = 0
        inputs = {
            "input_ids": tokens,
            "attention_mask": mask,
            "labels": tokens.masked_fill(mask == 0, _IGNORED),
        }
        try:
            with unchanged_random_state(devices_of(self._model)), evaluation_mode(self._model):
                whole, shared = run(**inputs), self.forward(run, dict(inputs))
            torch.clear_autocast_cache()  # or weights cast here would have no gradient later
        except (AssertionError, IndexError, RuntimeError, TypeError, ValueError) as error:
            raise self._refused(f"a forward pass over its parts fails: {error}") from error
        expected = whole["logits"][mask == 1]
        most = _SAME.get(str(expected.dtype).removeprefix("torch."), _SAME_IN_HALF)
        differs = (shared["logits"][mask == 1] - expected).abs().max() / expected.std()
        if not differs <= most:
            raise self._refused(f"its logits in parts differ from those of the whole by {differs:.1%}")
        once, parts = float(whole["loss"]), float(shared["loss"])
        if not abs(once - parts) <= most * abs(once):
            raise self._refused(f"its loss is {once:.4f}, and {parts:.4f} summed over the parts")

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
            inputs["position_ids"] = torch.arange(length, device=tokens.device).expand(rows, -1)
        if "attention_mask" not in inputs:
            inputs["attention_mask"] = torch.ones(rows, length, dtype=torch.long, device=tokens.device)
        labels = inputs.get("labels")
        if labels is not None:
            if labels.shape != (rows, length):
                raise self._refused(f"its labels are {tuple(labels.shape)}, and not one for each token")
            if "shift_labels" not in inputs:
                inputs["shift_labels"] = torch.nn.functional.pad(labels, (0, 1), value=_IGNORED)[:, 1:]
            if "num_items_in_batch" not in inputs:
                inputs["num_items_in_batch"] = inputs["shift_labels"].ne(_IGNORED).sum()
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
        import torch
        import torch.distributed as dist

        tensors = [torch.empty_like(own) for _ in range(self._size)]
        dist.all_gather(tensors, own.detach().contiguous(), group=self._group)
        tensors[self._rank] = own
        return tensors

    def _take_over(self, implementation: str) -> None:
        """Put this group's attention and masks in the place of an implementation's in this model."""
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
        return torch.cat(_all_to_all()(parts, self._group).unbind(), dim=2)


@functools.cache
def _all_to_all() -> Any:
    """Return a function of parts (one for each rank, along dimension 0) and a group: the parts for this rank.

    torch.distributed.nn has one, which torch 2.13 says will go.
    """
    import torch
    import torch.distributed as dist

    class AllToAll(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(context: Any, parts: Any, group: Any) -> Any:
            context.group = group
            received = torch.empty_like(parts)
            dist.all_to_all_single(received, parts, group=group)
            return received

        @staticmethod
        def backward(context: Any, gradients: Any) -> tuple[Any, None]:
            return AllToAll.apply(gradients.contiguous(), context.group), None

    return AllToAll.apply
