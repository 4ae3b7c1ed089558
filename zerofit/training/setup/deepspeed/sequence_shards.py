"""Sequence parallelism in DeepSpeed's engine.

This is Ulysses (https://arxiv.org/abs/2309.14509) with the engine's own groups, which sum the gradients of
the parts. DeepSpeed's classes for transformers are not used: they split batches before the script gets them,
so that a loop must compute its own loss, and they drop attention masks, which silently breaks left padding,
sliding windows and packed samples (deepspeed 0.19.8, runtime/sequence_parallel/ulysses_sp.py). Here the
engine's forward pass splits batches, and the script's inputs and outputs are whole.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zerofit.core.errors import UserError
from zerofit.core.upstream.deepspeed import sequence_groups
from zerofit.models.changes.sequence_shards import IGNORED, SequenceShards
from zerofit.training.batch.micro_batches.random_state import devices_of, unchanged_random_state
from zerofit.training.batch.micro_batches.separability import evaluation_mode
from zerofit.training.wrapping import wrap

if TYPE_CHECKING:
    from types import ModuleType

    from zerofit.training.changes import Changes
    from zerofit.training.settings import AppliedSettings
    from zerofit.training.wrapping import Wrapper

_TOLERANCE = {"float32": 1e-3, "float64": 1e-3}
_TOLERANCE_HALF = 5e-2
"""Relative difference of logits attributed to rounding. ASSUMPTION: a model that only attends to its own
part, or counts positions from the part's start, differs by more."""


def wrappers(accelerator_class: Any, settings: AppliedSettings, changes: Changes) -> dict[str, Wrapper]:
    """Tell a new Accelerator which ranks get the same batches."""
    size = settings.sequence_parallel_size
    if size == 1:
        return {}

    def init(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        from torch.distributed.device_mesh import init_device_mesh

        original(self, *args, **kwargs)
        _check_own(self.parallelism_config, size)
        if not hasattr(self.state, "ds_device_mesh"):
            # Under DeepSpeed accelerate gives ranks along "tp" the same samples (data_loader.py,
            # prepare_data_loader).
            shape = settings.plan.topology.data_parallel_size, size
            self.state.ds_device_mesh = init_device_mesh(self.device.type, shape, mesh_dim_names=("dp", "tp"))

    return {"__init__": init}


def install_in_deepspeed(module: ModuleType, settings: AppliedSettings, changes: Changes) -> None:
    """Pass the engine the groups over which it sums gradients and partitions.

    With groups from its configuration (data_parallel_size with sequence_parallel_size), it only uses the
    data-parallel ones, and never sums the parts' gradients (0.19.8, utils/groups.py,
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


def engine_wrappers(engine_class: Any, settings: AppliedSettings, changes: Changes) -> dict[str, Wrapper]:
    """Split the batch of the engine's forward pass over the group."""
    if settings.sequence_parallel_size == 1:
        return {}

    def forward(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        shards = self.__dict__.get("_zerofit_shards")
        if shards is None:
            shards = Shards(self.module, group=self.seq_parallel_group)
            self.__dict__["_zerofit_shards"] = shards
            shards.check(lambda **inputs: original(self, **inputs))
        return shards.forward(lambda **part: original(self, **part), shards.inputs_of(args, kwargs))

    return {"forward": forward}


def _check_own(config: Any, size: int) -> None:
    """Check that the script configures no parallelism of its own."""
    if config is not None and config.non_data_parallel_size > 1:
        raise UserError(
            "sequence-parallel-by-script",
            "the script configures its own parallelism",
            found=f"{size} sequence-parallel ranks, and a ParallelismConfig with tp_size={config.tp_size}, "
            f"cp_size={config.cp_size}, sp_size={config.sp_size}",
            why="both would split the same samples or layers",
            fix="use only one of the two",
        )


class _Ranks:
    """Peers of a torch.distributed process group."""

    def __init__(self, group: Any) -> None:
        import torch.distributed as dist

        self._group = group
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)

    def all_gather(self, own: Any) -> list[Any]:
        import torch
        import torch.distributed as dist

        tensors = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(tensors, own, group=self._group)
        return tensors

    def all_to_all(self, parts: Any) -> Any:
        import torch
        import torch.distributed as dist

        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=self._group)
        return received


class Shards(SequenceShards):
    """One model whose forward passes are split over a process group."""

    def __init__(self, model: Any, *, group: Any) -> None:
        super().__init__(model, _Ranks(group))

    def check(self, run: Any) -> None:
        """Check on a few tokens that the group computes the same as a single rank.

        Models that mix tokens outside attention (recurrent layers, convolutions), derive positions from
        the input's length or have another loss than next-token prediction would silently train wrong.

        Raises:
            UserError: results differ.
        """
        import torch

        length = 4 * self._size - 1  # not divisible: some tokens per rank, and padding
        device = next(iter(devices_of(self._model)))
        tokens = torch.arange(2 * length, device=device).view(2, length) * 7 % self._config.vocab_size
        mask = torch.ones_like(tokens)
        mask[1, -3:] = 0
        inputs = {
            "input_ids": tokens,
            "attention_mask": mask,
            "labels": tokens.masked_fill(mask == 0, IGNORED),
        }
        try:
            with unchanged_random_state(devices_of(self._model)), evaluation_mode(self._model):
                whole, shared = run(**inputs), self.forward(run, dict(inputs))
            torch.clear_autocast_cache()  # otherwise weights cast here would have no gradient later
        except (AssertionError, IndexError, RuntimeError, TypeError, ValueError) as error:
            raise self._refused(f"a forward pass on a part of the tokens fails: {error}") from error
        expected = whole["logits"][mask == 1]
        tolerance = _TOLERANCE.get(str(expected.dtype).removeprefix("torch."), _TOLERANCE_HALF)
        difference = (shared["logits"][mask == 1] - expected).abs().max() / expected.std()
        if not difference <= tolerance:
            raise self._refused(f"its logits differ by {difference:.1%} if the tokens are split")
        expected_loss, loss = float(whole["loss"]), float(shared["loss"])
        if not abs(expected_loss - loss) <= tolerance * abs(expected_loss):
            raise self._refused(f"its loss is {expected_loss:.4f}, and {loss:.4f} if the tokens are split")
