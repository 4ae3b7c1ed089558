"""What mixes the samples of a batch, and what a script's source calls."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from zerofit.scripts.capture.child.model_record import mixing_loss, mixing_modules
from zerofit.scripts.capture.child.script_source import CalledMethods, called_methods

if TYPE_CHECKING:
    from collections.abc import Iterator


def _modules() -> dict[str, tuple[Any, tuple[str, ...]]]:
    from torch import nn

    frozen = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    frozen.train()
    frozen[1].eval()
    return {
        "BatchNorm": (nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)), ("1",)),
        "SyncBatchNorm": (nn.Sequential(nn.SyncBatchNorm(3)), ("0",)),
        "InstanceNorm": (nn.Sequential(nn.InstanceNorm2d(3, track_running_stats=True)), ()),
        "LayerNorm and GroupNorm": (nn.Sequential(nn.LayerNorm(4), nn.GroupNorm(1, 4)), ()),
        "BatchNorm held in evaluation": (frozen, ()),
        "BatchNorm alone": (nn.BatchNorm1d(2), ("BatchNorm1d",)),
    }


def test_modules_that_mix_samples() -> None:
    found = {name: mixing_modules(model, model) for name, (model, _) in _modules().items()}
    assert found == {name: expected for name, (_, expected) in _modules().items()}


def test_losses_that_mix_samples() -> None:
    import transformers

    small = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 16,
        "vocab_size": 30,
        "num_local_experts": 2,
    }
    text = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    clip = transformers.CLIPConfig(
        text_config={**text, "vocab_size": 30}, vision_config={**text, "image_size": 8, "patch_size": 4}
    )
    experts = transformers.MixtralForCausalLM(transformers.MixtralConfig(**small))
    balanced = transformers.MixtralForCausalLM(transformers.MixtralConfig(**small, output_router_logits=True))
    found = [mixing_modules(one, one) for one in (transformers.CLIPModel(clip), experts, balanced)]
    assert found == [("contrastive_loss",), (), ("router_aux_loss",)]


_SUSPICIOUS = ("return_loss", "logit_scale", "diversity_loss", "contrastive_loss")
"""Words in the forward pass of a class whose loss may compare samples."""
_HARMLESS = {
    "Aimv2Model": "returns similarities, and no loss",
    "CohereForCausalLM": "a number that its logits are multiplied by",
    "Cohere2ForCausalLM": "the same",
    "Cohere2MoeForCausalLM": "the same",
    "CohereCompassForCausalLM": "the same",
    "CohereCompassForConditionalGeneration": "the same",
}
_WHOLE = re.compile(r"(Model|For[A-Z]\w+|Encoder)$")


def _suspicious() -> Iterator[tuple[str, str]]:
    """Yield module and name of transformers' whole models with such a word in their forward pass."""
    import transformers

    models = Path(transformers.__file__).parent / "models"
    for file in sorted(models.glob("*/modeling_*.py")):
        text = file.read_text(encoding="utf-8")
        if not any(word in text for word in _SUSPICIOUS):
            continue
        for node in ast.parse(text).body:
            if isinstance(node, ast.ClassDef) and _WHOLE.search(node.name):
                forwards = [one for one in node.body if getattr(one, "name", "") == "forward"]
                forward = "".join(ast.unparse(one) for one in forwards)
                if any(word in forward for word in _SUSPICIOUS):
                    yield f"transformers.models.{file.parent.name}.{file.stem}", node.name


@pytest.mark.slow
def test_every_model_of_transformers_whose_loss_may_mix_samples_is_known() -> None:
    found = {
        name: mixing_loss(getattr(importlib.import_module(module), name)) for module, name in _suspicious()
    }
    assert {name for name, loss in found.items() if not loss} == set(_HARMLESS)
    assert {"ClapModel", "PeAudioModel", "Wav2Vec2ForPreTraining", "SiglipModel"} <= set(found)


_SOURCES = [
    ("model.generate(ids)", (True, False, False)),
    ("accelerator.unwrap_model(model).save_pretrained('out')", (False, True, False)),
    ("torch.save(model.state_dict(), 'x.pt')", (False, True, False)),
    ("accelerator.save(state, 'x')", (False, True, False)),
    ("config.save(1)", (False, False, False)),
    ("def test():\n    model.eval()", (False, False, True)),
    ("generate = 1  # model.generate()", (False, False, False)),
    ("def broken(:", (False, False, False)),
]


@pytest.mark.parametrize(("text", "expected"), _SOURCES)
def test_what_a_source_calls(text: str, expected: tuple[bool, bool, bool]) -> None:
    generates, saves, evaluates = expected
    assert called_methods([text]) == CalledMethods(generates=generates, saves=saves, evaluates=evaluates)
