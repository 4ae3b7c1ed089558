"""Embeddings that ZeRO-3 partitions are resized only where their size changes."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from accelerators import quiet, settings
from captures import MODEL

from zerofit.core.strategy import ZeroStage
from zerofit.scripts.capture.child.model_record import class_path
from zerofit.training.deepspeed.partitioned_models import install


def _resized(
    rows: int,
    new_num_tokens: int | None,
    multiple: int | None,
    captured_rows: int | None,
    *,
    stage3: bool,
    of_this_class: bool = True,
) -> bool:
    """Return True if transformers' own resizing is called for embeddings of so many rows."""
    calls = []

    class Model:
        def get_input_embeddings(self) -> SimpleNamespace:
            return SimpleNamespace(weight=SimpleNamespace(**({"ds_shape": (rows, 8)} if stage3 else {})))

        def resize_token_embeddings(self, *sizes: int | None, mean_resizing: bool = True) -> None:
            calls.append(sizes)

    kind = class_path(Model) if of_this_class else "another.Model"
    facts = replace(MODEL.facts, vocab_size=captured_rows)
    captured = None if captured_rows is None else replace(MODEL, class_path=kind, facts=facts)
    changes, module = quiet(), SimpleNamespace(PreTrainedModel=Model)
    install(module, settings(zero_stage=ZeroStage.PARAMETERS, captured=captured), changes)  # type: ignore[arg-type]
    Model().resize_token_embeddings(new_num_tokens, multiple)
    assert calls in ([], [(new_num_tokens, multiple)])
    is_left = not calls and rows == captured_rows
    asks = f"the script asks for {new_num_tokens}, as ZeRO-3 hides their size"
    line = f"token embeddings stay at {rows} rows; {asks}"
    assert changes.lines == ((line,) if is_left and new_num_tokens != rows else ())
    return bool(calls)


@pytest.mark.parametrize(
    ("rows", "new_num_tokens", "multiple", "captured_rows", "resized"),
    [
        (1000, 1000, None, None, False),  # the same size
        (1000, 999, 8, None, False),  # the same size, once it is padded
        (1024, 1000, None, 1024, False),  # without ZeRO the script saw that there was room, and left it
        (1024, 1000, None, None, True),  # not captured: the script may want it smaller
        (1000, 1002, None, 1002, True),  # new tokens
        (1000, None, None, None, True),  # a question, and no change
    ],
)
def test_partitioned(
    rows: int, new_num_tokens: int | None, multiple: int | None, captured_rows: int | None, resized: bool
) -> None:
    assert _resized(rows, new_num_tokens, multiple, captured_rows, stage3=True) is resized


def test_embeddings_that_are_whole_are_left_to_transformers() -> None:
    assert _resized(1000, 1000, None, 1000, stage3=False)


def test_another_model_of_the_script_is_resized() -> None:
    assert _resized(1024, 1000, None, 1024, stage3=True, of_this_class=False)
