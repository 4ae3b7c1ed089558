"""Tiny models with a batch each, and gradients of a training step with and without splitting."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from zerofit.training.batch.micro_batches.hooks import replace_forward
from zerofit.training.batch.micro_batches.pending_backward import PendingBackward
from zerofit.training.batch.micro_batches.split_model import SplitModel
from zerofit.training.batch.micro_batches.splitter import Splitter
from zerofit.training.changes import Changes

_SAMPLES, _TOKENS, _WORDS = 5, 7, 19
_SIZES = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 12}


def _texts(*, num_ignored: tuple[int, ...] = (0, 2, 4, 1, 5)) -> dict[str, torch.Tensor]:
    words = torch.randint(3, _WORDS, (_SAMPLES, _TOKENS))
    labels = words.clone()
    for row, count in enumerate(num_ignored):
        labels[row, :count] = -100
    return {"input_ids": words, "attention_mask": torch.ones_like(words), "labels": labels}


def _gpt2() -> tuple[Any, dict[str, Any]]:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=_WORDS, n_positions=16, n_embd=8, n_layer=2, n_head=2)
    return GPT2LMHeadModel(config), _texts()


def _llama() -> tuple[Any, dict[str, Any]]:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(vocab_size=_WORDS, **_SIZES)), _texts()


def _bert(
    head: str, labels: dict[str, torch.Tensor] | None = None, **config: Any
) -> tuple[Any, dict[str, Any]]:
    import transformers

    made = transformers.BertConfig(vocab_size=_WORDS, max_position_embeddings=16, **_SIZES, **config)
    batch = _texts()
    if labels is not None:
        del batch["labels"]
        batch |= labels
    return getattr(transformers, f"BertFor{head}")(made), batch


def _t5() -> tuple[Any, dict[str, Any]]:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=_WORDS, d_model=8, d_kv=4, d_ff=12, num_layers=1, num_heads=2, decoder_start_token_id=0
    )
    return T5ForConditionalGeneration(config), _texts()


def _vit() -> tuple[Any, dict[str, Any]]:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(image_size=8, patch_size=4, num_labels=3, **_SIZES)
    return ViTForImageClassification(config), {
        "pixel_values": torch.randn(_SAMPLES, 3, 8, 8),
        "labels": torch.tensor([0, 1, 2, 1, 0]),
    }


def _clip() -> tuple[Any, dict[str, Any]]:
    from transformers import CLIPConfig, CLIPModel

    text = {"vocab_size": _WORDS, "max_position_embeddings": 16, "eos_token_id": 2, **_SIZES}
    config = CLIPConfig(
        text_config=text, vision_config={"image_size": 8, "patch_size": 4, **_SIZES}, projection_dim=6
    )
    batch = {"input_ids": torch.randint(3, _WORDS, (_SAMPLES, _TOKENS))}
    return CLIPModel(config), batch | {"pixel_values": torch.randn(_SAMPLES, 3, 8, 8), "return_loss": True}


def _mixtral() -> tuple[Any, dict[str, Any]]:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=_WORDS,
        num_key_value_heads=2,
        num_local_experts=4,
        output_router_logits=True,
        router_aux_loss_coef=0.01,
        **_SIZES,
    )
    return MixtralForCausalLM(config), _texts()


def _lora() -> tuple[Any, dict[str, Any]]:
    from peft import LoraConfig, get_peft_model

    model, batch = _gpt2()
    config = LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM")
    adapted = get_peft_model(model, config)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    return adapted, batch


def _frozen() -> tuple[Any, dict[str, Any]]:
    model, batch = _gpt2()
    model.transformer.h[0].requires_grad_(False)
    model.transformer.wte.requires_grad_(False)
    return model, batch


_ANSWERS = {"start_positions": torch.tensor([1, 2, 3, 0, 5]), "end_positions": torch.tensor([2, 4, 3, 0, 6])}
_MODELS: dict[str, Callable[[], tuple[Any, dict[str, Any]]]] = {
    "gpt2": _gpt2,
    "llama": _llama,
    "masked lm": lambda: _bert("MaskedLM"),
    "classification": lambda: _bert("SequenceClassification", {"labels": torch.tensor([0, 1, 1, 0, 1])}),
    "regression": lambda: _bert("SequenceClassification", {"labels": torch.randn(_SAMPLES)}, num_labels=1),
    "several labels": lambda: _bert(
        "SequenceClassification", {"labels": torch.rand(_SAMPLES, 3).round()}, num_labels=3
    ),
    "token classification": lambda: _bert(
        "TokenClassification",
        {"labels": torch.tensor([[0, -100, 1, 1, 2, -100, 0]] * 4 + [[-100] * 6 + [1]])},
        num_labels=3,
    ),
    "question answering": lambda: _bert("QuestionAnswering", dict(_ANSWERS)),
    "pretraining": lambda: _bert(
        "PreTraining",
        {"labels": _texts()["labels"], "next_sentence_label": torch.tensor([0, 1, 1, 0, 1])},
    ),
    "t5": _t5,
    "vit": _vit,
    "clip": _clip,
    "mixtral": _mixtral,
    "lora": _lora,
    "frozen": _frozen,
}


def tiny(name: str, *, seed: int = 0, dropout: bool = False) -> tuple[Any, dict[str, Any]]:
    """Return a model in training mode and a batch of five samples for it."""
    torch.manual_seed(seed)
    model, batch = _MODELS[name]()
    if not dropout:
        _without_dropout(model)
    return model.train(), batch


def _without_dropout(model: Any) -> None:
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for name in ("dropout_p", "attention_dropout", "dropout_prob", "dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)


@dataclass
class Split:
    """A model that runs in micro-batches."""

    model: Any
    split_model: SplitModel
    pending: PendingBackward
    changes: Changes
    boundaries: list[bool] = field(default_factory=list)
    """What each backward of a piece was told."""
    num_forwards: int = 0
    """Calls of the model's own forward."""

    def backward(self, loss: Any, *, is_boundary: bool = True) -> None:
        self.pending.backward(loss, run=self.run, is_boundary=is_boundary)

    def run(self, loss: Any, is_boundary: bool) -> None:
        self.boundaries.append(is_boundary)
        loss.backward()


def split(model: Any, micro_batch_size: int = 2, **options: Any) -> Split:
    """Put a splitter in the place of a model's forward."""
    original = model.forward

    def counted(*args: Any, **kwargs: Any) -> Any:
        made.num_forwards += 1
        return original(*args, **kwargs)

    model.forward = counted
    pending, changes = options.pop("pending", None) or PendingBackward(), Changes(announce=False)
    split_model = SplitModel(model, **{"no_sync": contextlib.nullcontext, **options})
    made = Split(model=model, split_model=split_model, pending=pending, changes=changes)
    splitter = Splitter(split_model, micro_batch_size=micro_batch_size, changes=changes, pending=pending)
    replace_forward(model, splitter)
    return made


def gradients(model: Any) -> dict[str, torch.Tensor]:
    """Take the gradients off a model."""
    taken = {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}
    model.zero_grad()
    return taken


_ROUNDING = 1e-5
"""Relative, of gradients whose sums are in another order; measured: up to 2.6e-6 on a Xeon with AVX-512."""


def assert_equal(
    found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], within: float = _ROUNDING
) -> None:
    """Compare gradients, relative to the largest of all."""
    assert found.keys() == expected.keys()
    assert expected
    scale = max(float(one.abs().max()) for one in expected.values())
    differences = {name: float((found[name] - one).abs().max()) / scale for name, one in expected.items()}
    assert {name: one for name, one in differences.items() if not one <= within} == {}
