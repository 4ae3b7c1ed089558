"""Tensor parallelism: checks models before DeepSpeed shards them, and broadcasts their initial weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zerofit.core.errors import UserError
from zerofit.core.upstream.deepspeed import takes_vocab_parallel_head, why_not_cut
from zerofit.training.setup.initial_weights import broadcast_initial_weights
from zerofit.training.wrapping import wrap

if TYPE_CHECKING:
    from types import ModuleType

    from zerofit.training.changes import Changes
    from zerofit.training.settings import AppliedSettings
    from zerofit.training.wrapping import Wrapper


def wrappers(accelerator_class: Any, settings: AppliedSettings, changes: Changes) -> dict[str, Wrapper]:
    """Check models before prepare() creates the engine that shards them."""
    size = settings.tensor_parallel_size
    if size == 1:
        return {}

    def prepare(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        import torch

        models = [model for model in args if isinstance(model, torch.nn.Module)]
        if not models:
            return original(self, *args, **kwargs)
        if takes_vocab_parallel_head():
            # Otherwise, with tied embeddings, each rank's logits only cover a part of the vocabulary, and
            # scripts, generate() and compute_metrics silently compute wrong results.
            config = self.state.deepspeed_plugin.hf_ds_config.config
            config["tensor_parallel"]["vocab_parallel_lm_head"] = False
        for model in models:
            check_model(model, size=size)
            # DeepSpeed only broadcasts each shard to the same shard of other groups
            # (deepspeed/runtime/engine.py, _broadcast_model).
            broadcast_initial_weights(model, changes)
        return original(self, *args, **kwargs)

    return {"prepare": prepare}


def install_in_loading(module: ModuleType, settings: AppliedSettings, changes: Changes) -> None:
    """Allow loading weights at stage 3, which transformers refuses with tensor parallelism.

    It assumes that layers may already be sharded (transformers 5.23, integrations/deepspeed.py,
    _apply_weight_conversions_to_state_dict), but DeepSpeed shards them when it creates the engine.

    Args:
        module: transformers.integrations.deepspeed.
    """

    def deepspeed_config(original: Any) -> Any:
        config = original()
        return config and {name: value for name, value in config.items() if name != "tensor_parallel"}

    if settings.tensor_parallel_size > 1:
        wrap(module, "deepspeed_config", deepspeed_config)


def check_model(model: Any, *, size: int) -> None:
    """Check that DeepSpeed can shard a model's layers for tensor parallelism into equal parts.

    Args:
        model: the trained model, whole.
        size: ranks per group.

    Raises:
        UserError: it can't.
    """
    name = type(model).__name__
    if getattr(model, "peft_config", None):
        raise UserError(
            "tensor-parallel-adapters",
            "tensor parallelism can't shard layers with adapters",
            found=f"{name} over {size} tensor-parallel ranks",
            why="DeepSpeed shards the layers around the adapters, and then doesn't find their parameters",
            fix="train without tensor parallelism, or without adapters",
            see="https://github.com/hiyouga/LLaMA-Factory/issues/8206",
        )
    if why := why_not_cut(model):
        raise UserError(
            "tensor-parallel-model",
            "DeepSpeed can't shard this model for tensor parallelism",
            found=f"{name} over {size} tensor-parallel ranks",
            why=why,
            fix="train without tensor parallelism; ZeRO-3 shards every model",
        )
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    dropout = getattr(text, "attention_dropout", 0)
    heads = getattr(text, "num_key_value_heads", None) or getattr(text, "num_attention_heads", None)
    if dropout and heads and heads % size:
        raise UserError(
            "tensor-parallel-uneven-dropout",
            "ranks with different numbers of heads draw different random numbers",
            found=f"{heads} key-value heads over {size} ranks, attention_dropout={dropout}",
            why="their random states then differ, and so do the weights that all ranks hold copies of",
            fix=f"set attention_dropout to 0, or --tensor-parallel-size to a divisor of {heads}",
        )
