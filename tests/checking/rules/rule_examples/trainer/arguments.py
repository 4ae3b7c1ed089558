"""Examples of the rules of zerofit/checking/rules/trainer/arguments.py."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rule_examples.example import EVALUATES, Example, Examples, at_zero, changed, without
from zerofit.core.command import Route

if TYPE_CHECKING:
    from collections.abc import Mapping

_BATCH = "train_micro_batch_size_per_gpu"
_STEPS = "gradient_accumulation_steps"
_TRAINS = changed(EVALUATES, "trainer.evaluate()\n", "")
_EVALUATES_EPOCHS = changed(_TRAINS, "max_steps=4,", 'max_steps=4, eval_strategy="epoch",')
_STOPS_EARLY = changed(_EVALUATES_EPOCHS, "transformers import", "transformers import EarlyStoppingCallback,")
_STOPS_EARLY = changed(
    _STOPS_EARLY, "eval_dataset=rows)", "eval_dataset=rows, callbacks=[EarlyStoppingCallback()])"
)
_AUTO: dict[str, Any] = {_BATCH: "auto", _STEPS: "auto", "zero_optimization": {"stage": 2}}
_ADAMW = {"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}


def _with(arguments: str, deepspeed: Mapping[str, Any] = _AUTO, /, **keys: Any) -> Example:
    named = f"--deepspeed ds_config.json {arguments}"
    return Example(deepspeed={**deepspeed, **keys}, route=Route.TRAINER, arguments=named)


EXAMPLES = {
    "trainer-values-differ": Examples(
        bad=_with("--per_device_train_batch_size 4", **{_BATCH: 2}),
        good=_with("--per_device_train_batch_size 4"),
    ),
    "trainer-accumulation-not-in-file": Examples(
        bad=_with("--gradient_accumulation_steps 4", without(_AUTO, _STEPS)),
        good=_with("--gradient_accumulation_steps 4"),
    ),
    "trainer-clipping-not-in-file": Examples(
        bad=_with("--max_grad_norm 0.3"),
        good=_with("--max_grad_norm 0.3", gradient_clipping="auto"),
    ),
    "trainer-argument-overridden": Examples(
        bad=_with("--optim sgd", **_ADAMW),
        good=_with("--optim sgd"),
    ),
    "activation-checkpointing-unread": Examples(
        bad=_with("", activation_checkpointing={"partition_activations": True}),
        good=_with("--gradient_checkpointing"),
    ),
    "best-model-needs-checkpoints": Examples(
        bad=_with("--load_best_model_at_end --eval_strategy no --save_strategy epoch"),
        good=_with("--eval_strategy no --save_strategy epoch"),
    ),
    "evaluation-needs-dataset": Examples(
        bad=at_zero(2, changed(_EVALUATES_EPOCHS, ", eval_dataset=rows", "")),
        good=at_zero(2, _EVALUATES_EPOCHS),
    ),
    "early-stopping-needs-metric": Examples(
        bad=at_zero(2, _STOPS_EARLY),
        good=at_zero(2, changed(_STOPS_EARLY, "max_steps=4,", 'max_steps=4, metric_for_best_model="loss",')),
    ),
    "trainer-takes-one-half-precision": Examples(
        bad=_with("--use_cpu --bf16 --fp16"),
        good=_with("--use_cpu"),
    ),
    "training-argument-unknown": Examples(
        bad=_with("--evaluation_strategy no"),
        good=_with("--eval_strategy no"),
    ),
    "trainer-unknown-optimizer": Examples(
        bad=_with("--optim adamw_hf"),
        good=_with("--optim adamw_torch"),
    ),
}
