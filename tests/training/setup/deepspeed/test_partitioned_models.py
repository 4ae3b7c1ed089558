"""Embeddings that ZeRO-3 partitions are resized only where their size changes."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerators import quiet, settings
from captures import MODEL
from transformers.integrations import is_deepspeed_zero3_enabled

from zerofit.core.errors import UserError
from zerofit.core.strategy import ZeroStage
from zerofit.scripts.capture.child.model_record import class_path
from zerofit.training.setup.deepspeed import partitioned_models
from zerofit.training.setup.deepspeed.partitioned_models import install


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
        @classmethod
        def from_pretrained(cls, name: str) -> None: ...

        _from_config = from_pretrained

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
    asks = f"the script asks for {new_num_tokens}, since ZeRO-3 hides their size"
    line = f"token embeddings stay at {rows} rows; {asks}"
    assert changes.lines == ((line,) if is_left and new_num_tokens != rows else ())
    return bool(calls)


@pytest.mark.parametrize(
    ("rows", "new_num_tokens", "multiple", "captured_rows", "resized"),
    [
        (1000, 1000, None, None, False),  # the same size
        (1001, 1001, None, None, False),  # the same size, which is odd
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


def test_a_model_that_is_loaded_with_a_device_map_after_the_training_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM, modeling_utils
    from transformers.integrations import HfDeepSpeedConfig

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    LlamaForCausalLM(LlamaConfig(vocab_size=16, **sizes)).save_pretrained(tmp_path)
    kept = modeling_utils.PreTrainedModel.__dict__["from_pretrained"]
    monkeypatch.setattr(modeling_utils.PreTrainedModel, "from_pretrained", kept)
    for name in ("resize_token_embeddings", "tie_weights"):
        monkeypatch.setattr(
            modeling_utils.PreTrainedModel, name, getattr(modeling_utils.PreTrainedModel, name)
        )
    changes = quiet()
    install(modeling_utils, settings(zero_stage=ZeroStage.PARAMETERS), changes)
    alive = HfDeepSpeedConfig({"zero_optimization": {"stage": 3}})
    with pytest.raises(ValueError, match="not compatible with passing a `device_map`"):
        LlamaForCausalLM.from_pretrained(tmp_path, device_map="cpu")
    monkeypatch.setattr(partitioned_models, "_has_engine", True)
    model = LlamaForCausalLM.from_pretrained(pretrained_model_name_or_path=tmp_path, device_map="cpu")
    assert model.lm_head.weight.shape == (16, 8)
    assert is_deepspeed_zero3_enabled()
    assert changes.lines == (
        "LlamaForCausalLM is loaded whole on each rank, since the script passes a device_map",
    )
    del alive


@pytest.mark.parametrize(
    ("partitioned", "equal", "gathers"),
    [((), False, False), (("first",), False, False), (("first", "second"), False, True)],
)
def test_tied_weights_are_compared_whole_where_zero_has_partitioned_both(
    partitioned: tuple[str, ...], gathers: bool, equal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from deepspeed.runtime import zero

    gathered, compare = [], []
    monkeypatch.setattr(zero, "GatheredParameters", lambda held: gathered.append(held) or nullcontext())
    monkeypatch.setattr(partitioned_models, "compare_tied_by", lambda _, made: compare.append(made))
    kind = type("Model", (), {"from_pretrained": classmethod(len), "_from_config": classmethod(len)})
    kind.resize_token_embeddings = None  # type: ignore[attr-defined]
    changes = quiet()
    install(SimpleNamespace(PreTrainedModel=kind), settings(zero_stage=ZeroStage.PARAMETERS), changes)  # type: ignore[arg-type]
    pair = {
        name: SimpleNamespace(**({"ds_id": 1} if name in partitioned else {})) for name in ("first", "second")
    }
    assert compare[0](lambda first, second: equal, pair["first"], pair["second"]) is equal
    assert gathered == ([[pair["first"], pair["second"]]] if gathers else [])
    assert bool(changes.lines) is gathers
    assert compare[0](lambda first, second: True, pair["first"], pair["first"]) is True
    assert len(gathered) == gathers


def test_a_parameter_without_elements_is_refused_under_zero3() -> None:
    """A model with optional register tokens has a parameter of shape (0, width)."""
    model = torch.nn.Linear(2, 2)
    partitioned_models.refuse_empty_parameters([model])
    model.registers = torch.nn.Parameter(torch.zeros(0, 2))
    with pytest.raises(UserError, match=r"empty-parameter-under-zero3(.|\n)*registers of shape \(0, 2\)"):
        partitioned_models.refuse_empty_parameters([None, model, None])


def test_models_with_a_parameters_of_their_own_are_refused_if_it_takes_no_recurse() -> None:
    class Narrow(torch.nn.Linear):
        def parameters(self) -> object:  # type: ignore[override]
            return (one for _, one in self.named_parameters())

    partitioned_models.refuse_own_parameters([torch.nn.Linear(2, 2), None])
    with pytest.raises(UserError, match=r"own-parameters-under-zero(.|\n)*Narrow.parameters\(\)"):
        partitioned_models.refuse_own_parameters([None, torch.nn.Linear(2, 2), Narrow(2, 2)])
