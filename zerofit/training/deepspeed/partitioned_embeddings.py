"""Keeps token embeddings as they are where a script resizes them only because ZeRO-3 hides their size.

Under stage 3 a parameter's own shape is (0,), so that `if len(tokenizer) > embeddings.weight.shape[0]` holds
whatever the size is. transformers then makes new embeddings, even of the same size, and the random numbers
that it draws for them shift every later one: the order of the samples too.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from zerofit.scripts.capture.child.model_record import class_path

if TYPE_CHECKING:
    from zerofit.core.capture import CapturedModel
    from zerofit.training.changes import Changes


def install(model_class: Any, changes: Changes, *, captured: CapturedModel | None) -> None:
    """Hook resize_token_embeddings.

    Args:
        model_class: transformers' PreTrainedModel.
        changes: where to note what was left as it is.
        captured: the model, as the script, without ZeRO, was about to train it; None where it was not
            captured.
    """
    original = model_class.resize_token_embeddings

    @functools.wraps(original)
    def resize(
        self: Any, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, **kwargs: Any
    ) -> Any:
        embeddings = self.get_input_embeddings()
        shape = getattr(embeddings.weight, "ds_shape", None)
        if shape is not None and new_num_tokens is not None:
            multiple = pad_to_multiple_of or 1
            is_captured = captured is not None and captured.class_path == class_path(type(self))
            rows = captured.facts.vocab_size if captured is not None and is_captured else None
            if shape[0] == -(-new_num_tokens // multiple) * multiple:
                return embeddings
            if shape[0] == rows:
                changes.add(
                    f"token embeddings stay at {shape[0]} rows; the script asks for {new_num_tokens}, as"
                    " ZeRO-3 hides their size"
                )
                return embeddings
        return original(self, new_num_tokens, pad_to_multiple_of, **kwargs)

    model_class.resize_token_embeddings = resize
