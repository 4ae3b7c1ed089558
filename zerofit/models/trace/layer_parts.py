"""Shards layers for the first tensor-parallel rank by transformers' plan, as DeepSpeed's AutoTP does.

Source: deepspeed 0.19.8, module_inject/layers.py (LinearLayer, LinearAllreduce), module_inject/auto_tp.py,
module_inject/tp_plan_converter.py and tp_shard.py. A shard allocates what those classes do.
"""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING, Any, Protocol

from zerofit.core.errors import UserError
from zerofit.core.upstream.transformers import tensor_plan_of

if TYPE_CHECKING:
    from collections.abc import Mapping

_COLUMNS = ("colwise", "colwise_rep", "colwise_gather_output")
_GATHERED = _COLUMNS[1:]
"""Styles whose outputs are gathered on each rank."""
_ROWS = ("rowwise",)
_WHOLE = ("embedding_rowwise", "replicated_with_grad_allreduce")
"""Styles that DeepSpeed accepts, but does not shard."""
_WITHOUT_HEADS = ("mlp", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
"""Substrings of the names of layers that are sharded evenly; others are sharded by key-value heads."""
_HEADS = ("lm_head", "embed_out")


class Peers(Protocol):
    """Collectives over the ranks of a tensor-parallel group."""

    size: int
    """Number of ranks."""

    def all_reduce(self, tensor: Any) -> None:
        """Sum a tensor over the ranks, in place."""

    def all_gather_into(self, buffer: Any, own: Any) -> None:
        """Fill a buffer with each rank's tensor."""


def cut_layers(model: Any, peers: Peers) -> None:
    """Replace each layer that DeepSpeed shards by the first rank's shard.

    Raises:
        UserError: transformers has no plan for the model, or DeepSpeed does not support it.
    """
    from torch import nn

    plan = _plan_of(model)
    for name, module in list(model.named_modules()):
        style = _style_of(f"{name}.weight", plan)
        is_cut = style is not None and style not in _WHOLE and isinstance(module, nn.Linear)
        if not is_cut or (style in _GATHERED and _is_tied(model, module)):
            continue
        part = _parts()[style in _ROWS](module, _share(module, model, name, peers, style in _ROWS), peers)
        part.gathers = style in _GATHERED
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, part)


def _plan_of(model: Any) -> Mapping[str, str]:
    """Return transformers' plan of a model, if DeepSpeed supports all of its styles."""
    found = tensor_plan_of(model)
    unknown = {style for style in found.values() if style not in (*_COLUMNS, *_ROWS, *_WHOLE)}
    if found and not unknown:
        return found
    if unknown:
        rule, why = (
            "tensor-parallel-model",
            f"its plan has styles that DeepSpeed does not support: {', '.join(sorted(unknown))}",
        )
    else:
        rule = "tensor-parallel-not-estimated"
        why = "transformers has no plan for it, and DeepSpeed's rules by layer name are not simulated"
    raise UserError(
        rule,
        "tensor parallelism of this model can't be planned",
        found=type(model).__name__,
        why=why,
        fix="plan without tensor parallelism; ZeRO-3 shards every model",
    )


def _style_of(name: str, plan: Mapping[str, str]) -> str | None:
    for pattern, style in plan.items():
        if re.fullmatch(".*" + pattern.replace(".", r"\.").replace("*", ".*") + r"\.weight", name):
            return style
    return None


def _is_tied(model: Any, module: Any) -> bool:
    """Return True for a head tied to the embeddings, which DeepSpeed does not shard."""
    embeddings = model.get_input_embeddings()
    return embeddings is not None and embeddings.weight is module.weight


def _share(module: Any, model: Any, name: str, peers: Peers, is_row: bool) -> int:
    """Return the number of rows or columns of the first rank's shard, whole heads in attention."""
    config = model.config.get_text_config()
    total: int = module.in_features if is_row else module.out_features
    heads: int = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    short = name.rpartition(".")[2]
    by_heads = not any(part in name for part in _WITHOUT_HEADS) and short not in _HEADS and total % heads == 0
    unit = total // heads if by_heads else 1
    units = total // unit
    return (units // peers.size + (units % peers.size > 0)) * unit


@functools.cache
def _parts() -> tuple[Any, Any]:
    """Return the classes of a linear layer's column shard and row shard."""
    import torch
    from torch import nn

    class SumGradients(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(context: Any, given: Any, peers: Peers) -> Any:
            context.peers = peers
            return given

        @staticmethod
        def backward(context: Any, gradient: Any) -> tuple[Any, None]:
            context.peers.all_reduce(gradient.contiguous())
            return gradient, None

    class SumOutputs(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(context: Any, output: Any, peers: Peers) -> Any:
            peers.all_reduce(output.contiguous())
            return output

        @staticmethod
        def backward(context: Any, gradient: Any) -> tuple[Any, None]:
            return gradient, None

    class Gathered(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(context: Any, own: Any, whole: int, peers: Peers) -> Any:
            context.size = own.shape[-1]
            own = own.contiguous()
            buffer = own.new_empty((peers.size * own.shape[0], *own.shape[1:]))
            peers.all_gather_into(buffer, own)
            parts = buffer.view(peers.size, *own.shape)
            sizes = [context.size] * (peers.size - 1)
            sizes.append(whole - sum(sizes))
            return torch.cat([part.narrow(-1, 0, n) for part, n in zip(parts, sizes, strict=True)], dim=-1)

        @staticmethod
        def backward(context: Any, gradient: Any) -> tuple[Any, None, None]:
            return gradient.narrow(-1, 0, context.size).contiguous(), None, None

    def first(parameter: Any, dim: int, size: int) -> Any:
        return nn.Parameter(parameter.detach().narrow(dim, 0, size).clone(), parameter.requires_grad)

    class Columns(nn.Module):  # type: ignore[misc]
        gathers = False

        def __init__(self, whole: Any, size: int, peers: Peers) -> None:
            super().__init__()
            self.weight = first(whole.weight, 0, size)
            self.bias = None if whole.bias is None else first(whole.bias, 0, size)
            self._whole, self._peers = whole.out_features, peers

        def forward(self, given: Any) -> Any:
            given = SumGradients.apply(given, self._peers)
            output = torch.matmul(given, self.weight.transpose(-1, -2))
            output = output if self.bias is None else output + self.bias
            return Gathered.apply(output, self._whole, self._peers) if self.gathers else output

    class Rows(nn.Module):  # type: ignore[misc]
        gathers = False

        def __init__(self, whole: Any, size: int, peers: Peers) -> None:
            super().__init__()
            self.weight, self.bias = first(whole.weight, 1, size), whole.bias
            self._peers = peers

        def forward(self, given: Any) -> Any:
            output = torch.matmul(given, self.weight.transpose(-1, -2))
            output = SumOutputs.apply(output, self._peers)
            return output if self.bias is None else output + self.bias

    return Columns, Rows
