"""The models of transformers in a module: itself, what peft wraps, the parts of a script's own class."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator


def transformers_parts(module: Any) -> Iterator[Any]:
    """Yield the outermost models of transformers in a torch.nn.Module."""
    import transformers

    if isinstance(module, transformers.PreTrainedModel):
        yield module
        return
    for child in module.children():
        yield from transformers_parts(child)
