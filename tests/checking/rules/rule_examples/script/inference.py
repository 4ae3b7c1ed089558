"""Examples of the rules of zerofit/checking/rules/script/inference.py."""

from __future__ import annotations

from rule_examples.example import (
    EVALUATES,
    INFERENCE,
    LANGUAGE,
    WHOLE_WEIGHTS,
    Example,
    Examples,
    at_zero,
    changed,
    zero,
)

_PREPARES = "model = accelerator.prepare(AutoModelForCausalLM.from_config(config))"
_UNPREPARED = changed(
    changed(INFERENCE, _PREPARES, "model = AutoModelForCausalLM.from_config(config)"),
    "model.module.generate",
    "model.generate",
)
_MADE = "teacher = AutoModelForCausalLM.from_config(config)\n"
_FIRST = "accelerator = Accelerator()\nset_seed(0)\n"
_ASKS_TEACHER = changed(
    LANGUAGE,
    "    loss = model(**batch).loss\n",
    "    with torch.no_grad():\n        hints = teacher(**batch).logits\n    loss = model(**batch).loss\n",
)
_CONFIG = _ASKS_TEACHER[_ASKS_TEACHER.index("config = LlamaConfig(") : _ASKS_TEACHER.index("model = Auto")]
_LATE_TEACHER = changed(_ASKS_TEACHER, _CONFIG, f"{_CONFIG}{_MADE}")
_EARLY_TEACHER = changed(_ASKS_TEACHER, _CONFIG, "")
_EARLY_TEACHER = changed(_EARLY_TEACHER, _FIRST, f"set_seed(0)\n{_CONFIG}{_MADE}{_FIRST}")
_INFERS_IN_LOOP = changed(
    LANGUAGE,
    "    optimizer.zero_grad()\n",
    "    optimizer.zero_grad()\n    with torch.inference_mode():\n        model(**batch)\n",
)
_KEEPS_WEIGHTS = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_clipping": 0.0,
    "zero_optimization": {"stage": 3, **WHOLE_WEIGHTS},
}
"""DeepSpeed's default limits of live parameters: small models stay gathered between passes."""
_AUTO = {"train_micro_batch_size_per_gpu": "auto", "gradient_clipping": "auto"}
_TWICE = changed(EVALUATES, "trainer.train()\n", "trainer.evaluate()\ntrainer.train()\n")
_ONLY = changed(EVALUATES, "trainer.train()\n", "")


EXAMPLES = {
    "inference-model-not-prepared": Examples(
        bad=at_zero(2, _UNPREPARED),
        good=at_zero(3, INFERENCE),
    ),
    "zero3-model-needs-engine": Examples(
        bad=at_zero(3, _LATE_TEACHER),
        good=at_zero(3, _EARLY_TEACHER),
    ),
    "zero3-no-inference-mode": Examples(
        bad=Example(deepspeed=_KEEPS_WEIGHTS, script=_INFERS_IN_LOOP),
        good=Example(
            deepspeed=_KEEPS_WEIGHTS,
            script=changed(_INFERS_IN_LOOP, "torch.inference_mode()", "torch.no_grad()"),
        ),
    ),
    "trainer-inference-needs-zero3": Examples(
        bad=Example(deepspeed=zero(2, **_AUTO), script=_ONLY),
        good=Example(deepspeed=zero(3, **_AUTO), script=_ONLY),
    ),
    "zero3-evaluate-before-train": Examples(
        bad=Example(deepspeed=zero(3, **_AUTO), script=_TWICE),
        good=Example(deepspeed=zero(3, **_AUTO), script=EVALUATES),
    ),
}
