"""Liger's kernels in a trace: the tensors that they save and allocate, without the kernels.

Source: https://github.com/linkedin/Liger-Kernel/tree/ead96b61/src/liger_kernel, in ops/ and transformers/.
The package need not be installed: what its kernels allocate follows from shapes. Mixtures of experts, layer
norms and vision towers keep transformers' own operators here, which need more.
"""

from __future__ import annotations

import inspect
import math
import sys
from contextlib import ExitStack, contextmanager
from functools import cache, partial, wraps
from typing import TYPE_CHECKING, Any

from zerofit.core.allocation_log import FusedKernel
from zerofit.models.changes.checkpointing import transformers_parts
from zerofit.models.changes.liger import FAMILIES, check_family
from zerofit.models.trace.prepare import attribute_replaced

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

_FUSED_LOSSES = {FusedKernel.FUSED_LINEAR_CROSS_ENTROPY, FusedKernel.FIRST_FUSED_LINEAR_CROSS_ENTROPY}
_ROTATE = "apply_rotary_pos_emb"
_OWN_ROPE = {
    *("deepseek_v4", "gemma4", "gemma4_text", "glm4", "glm4v", "glm4v_moe", "internvl", "llava", "nemotron"),
    *("qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next", "smolvlm"),
}
_OWN_SWIGLU = {
    "deepseek_v4",
    "gpt_oss",
    "internvl",
    "llava",
    "nemotron",
    "qwen3_vl",
    "qwen3_vl_text",
    "smolvlm",
}
_OWN_NORMS = {"llava", "nemotron"}
_WHOLE_LOGITS = {"granite"}
"""Families whose rotary embeddings, feed-forward blocks, norms or logits stay as they are by default."""
_NOT_IN_PLACE = {
    *("gemma2", "gemma3", "gemma3_text", "gemma4", "gemma4_text", "glm4", "glm4v", "glm4v_moe", "olmo2"),
    *("olmo3", "exaone4", "qwen3_next", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text"),
}
"""Families whose norms write gradients to memory of their own (transformers/rms_norm.py)."""
_PROCESSORS = 108
"""ASSUMPTION: those of an A100. A norm's backward pass has a row of fp32 sums for each, 2 MB in all."""


@contextmanager
def fused_kernels(
    model: Any, kernels: Iterable[FusedKernel], note_kernel: Callable[..., None]
) -> Iterator[None]:
    """Make a model allocate what these kernels do inside.

    Args:
        note_kernel: is called in a kernel's place, with its tensors.

    Raises:
        UserError: Liger has no kernels for the model's family.
    """
    wanted = frozenset(kernels)
    with ExitStack() as stack:
        for part in transformers_parts(model) if wanted else ():
            for holder, name, value in _replacements(part, wanted, note_kernel):
                stack.enter_context(attribute_replaced(holder, name, value))
        yield


def heads_read_by_losses(model: Any, kernels: Iterable[FusedKernel]) -> dict[str, Any]:
    """Return the weights of the head that a fused loss reads, by the name of the module that reads them.

    The loss reads them outside the head's own forward pass. DeepSpeed then registers them with the module
    that runs, and gathers them with it (runtime/zero/partition_parameters.py, ZeROOrderedDict).
    """
    if not _FUSED_LOSSES & frozenset(kernels):
        return {}
    names = {id(module): name for name, module in model.named_modules()}
    return {
        names[id(part)]: _weights_of(head)
        for part in transformers_parts(model)
        if (head := _head(part)) is not None and part.config.model_type not in _WHOLE_LOGITS
    }


def _replacements(
    part: Any, wanted: frozenset[FusedKernel], note: Callable[..., None]
) -> Iterator[tuple[Any, str, Any]]:
    """Yield (holder, attribute, replacement) of one transformers model."""
    family = part.config.model_type
    check_family(part, FAMILIES)
    modeling = _modeling(part)
    if FusedKernel.ROPE in wanted and family not in _OWN_ROPE and hasattr(modeling, _ROTATE):
        yield modeling, _ROTATE, partial(_rotate, note)
    for module in part.modules():
        if FusedKernel.RMS_NORM in wanted and family not in _OWN_NORMS and _is_rms_norm(module):
            yield module, "forward", partial(_normalize, module, note, family not in _NOT_IN_PLACE)
        if FusedKernel.SWIGLU in wanted and family not in _OWN_SWIGLU:
            forward = _gated(module, note)
            if forward is not None:
                yield module, "forward", forward
    head = _head(part)
    if head is None:
        return
    is_fused = bool(wanted & _FUSED_LOSSES)
    if FusedKernel.CROSS_ENTROPY in wanted or (is_fused and family in _WHOLE_LOGITS):
        yield part, "_loss_function", partial(_loss_of_logits, note)
    elif is_fused:
        is_first = FusedKernel.FIRST_FUSED_LINEAR_CROSS_ENTROPY in wanted
        yield part, "forward", _with_fused_loss(part, head, note, is_first=is_first)


def _modeling(part: Any) -> Any:
    """Return the module of transformers that defines a model, also where FSDP2 has derived a class of it."""
    own = next((kind for kind in type(part).__mro__ if ".modeling_" in kind.__module__), type(part))
    return sys.modules[own.__module__]


def _is_rms_norm(module: Any) -> bool:
    return type(module).__name__.endswith("RMSNorm") and getattr(module, "weight", None) is not None


def _head(part: Any) -> Any:
    """Return the linear layer that makes the logits of a language model; None without one."""
    if not type(part).__name__.endswith(("ForCausalLM", "ForConditionalGeneration")):
        return None
    head = part.get_output_embeddings()
    return None if head is None or not _weights_of(head).dtype.is_floating_point else head


def _weights_of(head: Any) -> Any:
    """Return the weights that the loss reads: those that train, if peft trains a copy of the head."""
    copies = getattr(head, "modules_to_save", None)
    head = next(iter(copies.values()), head) if copies is not None else head
    return getattr(head, "base_layer", head).weight


def _gated(module: Any, note: Callable[..., None]) -> Callable[[Any], Any] | None:
    """Return the forward pass of a gated feed-forward block; None for other modules."""
    if {"gate_proj", "up_proj", "down_proj", "act_fn"} <= {*module._modules, *vars(module)}:
        return lambda hidden: module.down_proj(
            _gate_function().apply(module.gate_proj(hidden), module.up_proj(hidden), note)
        )
    if {"gate_up_proj", "down_proj"} <= module._modules.keys():  # of Phi-3 and GLM-4

        def forward(hidden: Any) -> Any:
            gate, up = module.gate_up_proj(hidden).chunk(2, dim=-1)
            return module.down_proj(_gate_function().apply(gate, up, note))

        return forward
    return None


def _normalize(module: Any, note: Callable[..., None], in_place: bool, hidden: Any) -> Any:
    return _norm_function().apply(hidden, module.weight, in_place, note)


def _rotate(note: Callable[..., None], query: Any, key: Any, cos: Any, sin: Any, *_: Any, **__: Any) -> Any:
    return _rotation_function().apply(query, key, cos, sin, note)


def _loss_of_logits(
    note: Callable[..., None],
    logits: Any,
    labels: Any,
    vocab_size: int,
    shift_labels: Any = None,
    **_: Any,
) -> Any:
    """Compute transformers' loss of language models by Liger's cross entropy (loss/loss_utils.py)."""
    logits = logits.float()
    targets = _shifted(labels) if shift_labels is None else shift_labels
    return _cross_entropy_function().apply(logits.view(-1, vocab_size), targets.view(-1), note)


def _shifted(labels: Any) -> Any:
    import torch

    return torch.nn.functional.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()


def _with_fused_loss(part: Any, head: Any, note: Callable[..., None], *, is_first: bool) -> Any:
    """Return a model's forward pass in which the head computes the loss, as there are no logits."""
    original = part.forward
    signature = inspect.signature(original)

    @wraps(original)  # others ask for its arguments
    def forward(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        given = {**bound.arguments, **bound.arguments.get("kwargs", {})}
        labels, shifted = given.get("labels"), given.get("shift_labels")
        if not part.training or (labels is None and shifted is None):
            return original(*args, **kwargs)

        def loss(hidden: Any) -> Any:
            if is_first:
                assert labels is not None
                hidden, targets = hidden[..., :-1, :].contiguous(), labels[..., 1:].contiguous()
            else:
                targets = _shifted(labels) if shifted is None else shifted
            return _loss_function().apply(hidden, _weights_of(head), targets, is_first, note)

        with (
            attribute_replaced(head, "forward", loss),
            attribute_replaced(part, "_loss_function", lambda logits, *_, **__: logits),
        ):
            outputs = original(*args, **kwargs)
        if isinstance(outputs, tuple):
            return outputs
        return type(outputs)(**{name: value for name, value in outputs.items() if name != "logits"})

    return forward


@cache
def _gate_function() -> Any:
    import torch

    class Gate(torch.autograd.Function):  # type: ignore[misc]
        """A gated projection, whose gradients are written over its inputs (ops/swiglu.py)."""

        @staticmethod
        def forward(ctx: Any, gate: Any, up: Any, note: Callable[..., None]) -> Any:
            gate, up = gate.contiguous(), up.contiguous()
            made = torch.empty_like(gate)
            note(gate, up, made)
            ctx.save_for_backward(gate, up)
            ctx.note = note
            return made

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> tuple[Any, ...]:
            gate, up = ctx.saved_tensors
            ctx.note(gate, up, gradient.contiguous(), gate, up)
            return gate, up, None

    return Gate


@cache
def _norm_function() -> Any:
    import torch

    class Norm(torch.autograd.Function):  # type: ignore[misc]
        """A root mean square norm, which saves its input and a number a row (ops/rms_norm.py)."""

        @staticmethod
        def forward(ctx: Any, hidden: Any, weight: Any, in_place: bool, note: Callable[..., None]) -> Any:
            rows = hidden.contiguous().view(-1, hidden.shape[-1])
            made = torch.empty_like(rows)
            means = rows.new_empty(rows.shape[0], dtype=torch.float32)
            note(rows, made)
            ctx.save_for_backward(rows, weight, means)
            ctx.in_place, ctx.note = in_place, note
            return made.view(hidden.shape)

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> tuple[Any, ...]:
            rows, weight, _ = ctx.saved_tensors
            incoming = gradient.contiguous()
            made = incoming if ctx.in_place else torch.zeros_like(incoming)
            sums = weight.new_empty((_PROCESSORS, rows.shape[-1]), dtype=torch.float32)
            ctx.note(rows, incoming, made)
            return made.view(gradient.shape), sums.sum(dim=0).to(weight.dtype), None, None

    return Norm


@cache
def _rotation_function() -> Any:
    import torch

    class Rotation(torch.autograd.Function):  # type: ignore[misc]
        """Rotates queries and keys, and their gradients, where they are (ops/rope.py)."""

        @staticmethod
        def forward(ctx: Any, query: Any, key: Any, cos: Any, sin: Any, note: Callable[..., None]) -> Any:
            rotated = [tensor.transpose(1, 2).contiguous() for tensor in (query, key)]
            cos, sin = cos.contiguous(), sin.contiguous()
            note(*rotated, *rotated)
            ctx.save_for_backward(cos, sin)
            ctx.note = note
            return tuple(tensor.transpose(1, 2) for tensor in rotated)

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
            rotated = [tensor.transpose(1, 2).contiguous() for tensor in gradients]
            ctx.note(*rotated, *rotated)
            return (*(tensor.transpose(1, 2) for tensor in rotated), None, None, None)

    return Rotation


@cache
def _cross_entropy_function() -> Any:
    import torch

    class CrossEntropy(torch.autograd.Function):  # type: ignore[misc]
        """A loss that writes the gradient over the logits (ops/cross_entropy.py)."""

        @staticmethod
        def forward(ctx: Any, logits: Any, targets: Any, note: Callable[..., None]) -> Any:
            losses = logits.new_zeros(logits.shape[0])
            note(logits, logits)
            ctx.save_for_backward(logits)
            ctx.note = note
            return losses.sum()

        @staticmethod
        def backward(ctx: Any, _: Any) -> tuple[Any, ...]:
            (logits,) = ctx.saved_tensors
            return logits, None, None

    return CrossEntropy


@cache
def _loss_function() -> Any:
    import torch

    class FusedLoss(torch.autograd.Function):  # type: ignore[misc]
        """A head and its loss, piece by piece, with their gradients (ops/fused_linear_cross_entropy.py)."""

        @staticmethod
        def forward(
            ctx: Any, hidden: Any, weight: Any, targets: Any, is_first: bool, note: Callable[..., None]
        ) -> Any:
            rows = hidden.view(-1, hidden.shape[-1])
            of_hidden = torch.zeros_like(rows)
            of_weight = torch.zeros_like(weight) if weight.requires_grad else None
            losses = rows.new_zeros(rows.shape[0], dtype=torch.float32)
            start = 0
            for size in _sizes_of_pieces(hidden.shape, weight.shape):
                piece = rows[start : start + size]
                logits = piece @ weight.t()
                low = logits.dtype
                if is_first:
                    logits = logits.float()
                note(logits, logits)
                if is_first:
                    logits = logits.to(low)
                    scaled = logits * 1.0
                else:
                    scaled = logits
                of_hidden[start : start + size] = scaled @ weight
                if of_weight is not None:
                    _add_gradient(of_weight, logits, piece, is_first=is_first, note=note)
                start += size
            ctx.save_for_backward(of_hidden, of_weight)
            ctx.shape = hidden.shape
            return losses.sum()

        @staticmethod
        def backward(ctx: Any, _: Any) -> tuple[Any, ...]:
            of_hidden, of_weight = ctx.saved_tensors
            return of_hidden.view(ctx.shape), of_weight, None, None, None

    return FusedLoss


def _sizes_of_pieces(hidden: Any, weight: Any) -> list[int]:
    """Return the rows of each piece of the logits, about as large in all as the hidden states.

    Liger rounds the rows of a piece up to a power of two. Here each sample is divided alike, so that memory
    grows evenly with the samples.
    """
    *samples, length, width = hidden
    pieces = 1 << max(0, (-(-weight[0] // width)).bit_length() - 1)
    columns = -(-length // pieces)
    rows = math.prod(samples)
    return [rows * min(columns, length - start) for start in range(0, length, columns)]


def _add_gradient(total: Any, logits: Any, piece: Any, *, is_first: bool, note: Callable[..., None]) -> None:
    """Add the gradient of the head's weights of one piece."""
    import torch

    if is_first and total.dtype == logits.dtype == piece.dtype:
        torch.addmm(total, logits.t(), piece, out=total)
    elif total.dtype is torch.float32 and logits.dtype is not torch.float32:
        # One kernel reads 16 bit and adds to fp32, from PyTorch 2.8 on.
        note(total, logits, piece.to(logits.dtype), flops=2 * piece.shape[0] * total.numel())
    else:
        total += torch.mm(logits.t(), piece).float()
