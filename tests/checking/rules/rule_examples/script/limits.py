"""Examples of the rules of zerofit/checking/rules/script/limits.py.

Each bad script is refused once it is captured; `capture` has what its capture shows, for tests without one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rule_examples.example import (
    EVALUATES,
    LANGUAGE,
    SMALL,
    TWO_RANKS,
    Example,
    Examples,
    at_zero,
    changed,
    zero,
)
from zerofit.core.capture import CapturedGroup, CapturedOptimizer
from zerofit.core.strategy import (
    Engine,
    Lora,
    OptimizerName,
    Precision,
    Quantization,
    Strategy,
    ZeroStage,
)

_ALONE = Strategy()
_ZERO2 = Strategy(engine=Engine.DEEPSPEED, zero_stage=ZeroStage.GRADIENTS)
_ZERO3 = replace(_ZERO2, zero_stage=ZeroStage.PARAMETERS)
_NOT_OF_TRANSFORMERS = {"model_is_transformers": False, "model_class_path": "torch.nn.Sequential"}
_OPTIMIZER = "optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)\n"
_PREPARES = "model, optimizer, loader = accelerator.prepare(model, optimizer, loader)\n"
_MODEL = "model = AutoModelForCausalLM.from_config(config)\n"
_STEPS = "    optimizer.step()\n    optimizer.zero_grad()\n"


def _optimizer(*, is_prepared: bool = True, num_parameters: int = 1, **settings: Any) -> CapturedOptimizer:
    """Return AdamW as a capture shows it; is_element_wise is set for an optimizer of the script's own."""
    is_own = settings.pop("is_own", False)
    group = CapturedGroup(num_tensors=1, num_parameters=num_parameters, settings={"lr": 1e-3, **settings})
    return CapturedOptimizer(
        class_path="train.NormSGD" if is_own else "torch.optim.adamw.AdamW",
        groups=(group,),
        is_prepared=is_prepared,
        is_element_wise=not is_own,
    )


def _run(script: str, strategy: Strategy = _ALONE, **capture: Any) -> Example:
    """Return a script under `zerofit launch` with a strategy's flags, on two ranks."""
    return Example(script=script, strategy=strategy, topology=TWO_RANKS, capture=capture)


_MIXES = changed(SMALL, "torch.nn.Tanh()", "torch.nn.BatchNorm1d(16), torch.nn.Tanh()")
_WHOLE = {**_NOT_OF_TRANSFORMERS, "micro_batch_size": 2, "model_mixes_samples": ("1",)}
_SPLITS = changed(SMALL, "import Accelerator\n", "import Accelerator, DataLoaderConfiguration\n")
_SPLITS = changed(
    _SPLITS,
    "Accelerator()\n",
    "Accelerator(dataloader_config=DataLoaderConfiguration(split_batches=True))\n",
)
_SPLITS = changed(_SPLITS, "batch_size=2", "batch_size=4")
_THREE = changed(_SPLITS, "batch_size=4", "batch_size=3")
_LOCAL = changed(SMALL, "from torch.utils", "from accelerate.local_sgd import LocalSGD\nfrom torch.utils")
_LOCAL = changed(
    _LOCAL,
    """\
for batch in loader:
    loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
""",
    """\
with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=4) as local_sgd:
    for batch in loader:
        loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        local_sgd.step()
""",
)
_TWO_OPTIMIZERS = changed(
    SMALL,
    _OPTIMIZER,
    """\
optimizer = torch.optim.AdamW(model[0].parameters(), lr=0.01)
other = torch.optim.AdamW(model[2].parameters(), lr=0.01)
""",
)
_TWO_OPTIMIZERS = changed(
    _TWO_OPTIMIZERS,
    _PREPARES,
    "model, optimizer, other, loader = accelerator.prepare(model, optimizer, other, loader)\n",
)
_TWO_OPTIMIZERS = changed(_TWO_OPTIMIZERS, _STEPS, f"{_STEPS}{_STEPS.replace('optimizer', 'other')}")
_BOTH = {**_NOT_OF_TRANSFORMERS, "optimizers": (_optimizer(), _optimizer())}
_UNPREPARED_OPTIMIZER = changed(SMALL, _PREPARES, "model, loader = accelerator.prepare(model, loader)\n")
_WITH_OTHERS = changed(
    SMALL,
    _OPTIMIZER,
    """\
scale = torch.nn.Parameter(torch.ones(3))
optimizer = torch.optim.AdamW([*model.parameters(), scale], lr=0.01)
""",
)
_NORMS = changed(SMALL, "torch.optim.AdamW(model", "NormSGD(model")
_NORMS = changed(
    _NORMS,
    "accelerator = Accelerator()\n",
    """\

class NormSGD(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    weight.sub_(weight.grad / (weight.grad.norm() + 1e-6), alpha=group["lr"])


accelerator = Accelerator()
""",
)
_SCHEDULED: dict[str, Any] = {
    **zero(2),
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 2}},
}
_AMSGRAD = changed(SMALL, "lr=0.01", "lr=0.01, amsgrad=True")
_STUDENT_AND_TEACHER = changed(
    LANGUAGE, _PREPARES, f"teacher = AutoModelForCausalLM.from_config(config)\n{_PREPARES}"
)
_TWO_MODELS = changed(
    _STUDENT_AND_TEACHER,
    _PREPARES,
    "model, teacher, optimizer, loader = accelerator.prepare(model, teacher, optimizer, loader)\n",
)
_ADAPTED = changed(
    changed(LANGUAGE, "from torch.utils", "from peft import LoraConfig, get_peft_model\nfrom torch.utils"),
    _MODEL,
    'model = get_peft_model(AutoModelForCausalLM.from_config(config), LoraConfig(task_type="CAUSAL_LM"))\n',
)
_AVERAGES = changed(SMALL, _PREPARES, f"average = torch.optim.swa_utils.AveragedModel(model)\n{_PREPARES}")
_AVERAGES = changed(_AVERAGES, _STEPS, f"{_STEPS}    average.update_parameters(model)\n")
_CLAMPS = changed(
    SMALL,
    _STEPS,
    f"""\
{_STEPS}    with torch.no_grad():
        for weight in model.parameters():
            weight.clamp_(-1, 1)
""",
)
_QUANTIZED = changed(
    changed(LANGUAGE, "LlamaConfig, set_seed", "BitsAndBytesConfig, LlamaConfig, set_seed"),
    _MODEL,
    """\
quantization = BitsAndBytesConfig(load_in_4bit=True)
model = AutoModelForCausalLM.from_pretrained("model", quantization_config=quantization)
""",
)
_IS_QUANTIZED = {"model_is_quantized": True, "mixed_precision": "bf16"}

EXAMPLES = {
    "batches-stay-whole": Examples(
        bad=_run(_MIXES, replace(_ALONE, micro_batch_size=1), **_WHOLE),
        good=_run(_MIXES, **_WHOLE),
    ),
    "batches-of-unknown-size": Examples(
        bad=_run(SMALL, replace(_ALONE, micro_batch_size=1), **_NOT_OF_TRANSFORMERS, micro_batch_size=None),
        good=_run(SMALL, **_NOT_OF_TRANSFORMERS, micro_batch_size=None),
    ),
    "batches-split-in-equal-parts": Examples(
        bad=_run(SMALL, replace(_ALONE, micro_batch_size=3), **_NOT_OF_TRANSFORMERS, micro_batch_size=2),
        good=_run(SMALL, replace(_ALONE, micro_batch_size=1), **_NOT_OF_TRANSFORMERS, micro_batch_size=2),
    ),
    "split-batch-not-divisible": Examples(
        bad=_run(_THREE, **_NOT_OF_TRANSFORMERS, splits_batches=True, micro_batch_size=3),
        good=_run(_SPLITS, **_NOT_OF_TRANSFORMERS, splits_batches=True, micro_batch_size=4),
    ),
    "script-asks-for-cpu": Examples(
        bad=_run(
            changed(SMALL, "Accelerator()", "Accelerator(cpu=True)"),
            **_NOT_OF_TRANSFORMERS,
            asks_for_cpu=True,
        ),
        good=_run(SMALL, **_NOT_OF_TRANSFORMERS),
    ),
    "checkpointing-needs-support": Examples(
        bad=_run(
            SMALL,
            replace(_ALONE, gradient_checkpointing=True),
            **_NOT_OF_TRANSFORMERS,
            model_can_checkpoint=False,
        ),
        good=_run(SMALL, **_NOT_OF_TRANSFORMERS, model_can_checkpoint=False),
    ),
    "local-sgd-needs-pytorch": Examples(
        bad=at_zero(2, _LOCAL, capture={"uses_local_sgd": True}),
        good=at_zero(2, SMALL, capture={}),
    ),
    "one-optimizer-per-engine": Examples(
        bad=_run(_TWO_OPTIMIZERS, _ZERO2, **_BOTH),
        good=_run(_TWO_OPTIMIZERS, **_BOTH),
    ),
    "engine-needs-prepared-optimizer": Examples(
        bad=_run(
            _UNPREPARED_OPTIMIZER,
            _ZERO2,
            **_NOT_OF_TRANSFORMERS,
            optimizers=(_optimizer(is_prepared=False),),
        ),
        good=_run(SMALL, _ZERO2, **_NOT_OF_TRANSFORMERS),
    ),
    "engine-steps-the-model-alone": Examples(
        bad=_run(
            _WITH_OTHERS,
            _ZERO2,
            **_NOT_OF_TRANSFORMERS,
            optimizers=(_optimizer(num_parameters=10**12),),
        ),
        good=_run(SMALL, _ZERO2, **_NOT_OF_TRANSFORMERS),
    ),
    "zero-needs-element-wise-optimizer": Examples(
        bad=_run(_NORMS, _ZERO2, **_NOT_OF_TRANSFORMERS, optimizers=(_optimizer(is_own=True),)),
        good=_run(_NORMS, **_NOT_OF_TRANSFORMERS, optimizers=(_optimizer(is_own=True),)),
    ),
    "deepspeed-makes-parts-of-script": Examples(
        bad=replace(_run(EVALUATES, made_by_engine=("scheduler",)), deepspeed=_SCHEDULED),
        good=replace(_run(EVALUATES, _ZERO2, made_by_engine=("scheduler",)), deepspeed=_SCHEDULED),
    ),
    "optimizer-option-without-replacement": Examples(
        bad=_run(
            _AMSGRAD,
            replace(_ALONE, optimizer=OptimizerName.ADAMW_8BIT),
            **_NOT_OF_TRANSFORMERS,
            optimizers=(_optimizer(amsgrad=True),),
        ),
        good=_run(_AMSGRAD, **_NOT_OF_TRANSFORMERS, optimizers=(_optimizer(amsgrad=True),)),
    ),
    "replacement-needs-one-optimizer": Examples(
        bad=_run(_TWO_OPTIMIZERS, replace(_ALONE, optimizer=OptimizerName.ADAMW), **_BOTH),
        good=_run(_TWO_OPTIMIZERS, **_BOTH),
    ),
    "quantized-base-sets-precision": Examples(
        bad=_run(_QUANTIZED, replace(_ALONE, precision=Precision.FP32), **_IS_QUANTIZED),
        good=_run(_QUANTIZED, **_IS_QUANTIZED),
    ),
    "changes-need-one-model": Examples(
        bad=_run(_TWO_MODELS, replace(_ALONE, lora=Lora()), num_models=2),
        good=_run(_TWO_MODELS, num_models=2),
    ),
    "script-has-adapters": Examples(
        bad=_run(_ADAPTED, replace(_ALONE, lora=Lora()), model_adapters=("LORA",)),
        good=_run(_ADAPTED, model_adapters=("LORA",)),
    ),
    "quantization-needs-from-pretrained": Examples(
        bad=_run(
            LANGUAGE,
            replace(_ALONE, lora=Lora(), quantization=Quantization.NF4),
            model_loads_weights=False,
        ),
        good=_run(LANGUAGE, replace(_ALONE, lora=Lora()), model_loads_weights=False),
    ),
    "attention-needs-transformers": Examples(
        bad=_run(SMALL, replace(_ALONE, attention="sdpa"), **_NOT_OF_TRANSFORMERS),
        good=_run(SMALL, **_NOT_OF_TRANSFORMERS),
    ),
    "liger-needs-transformers": Examples(
        bad=_run(SMALL, replace(_ALONE, liger=True), **_NOT_OF_TRANSFORMERS),
        good=_run(SMALL, **_NOT_OF_TRANSFORMERS),
    ),
    "quantized-script-below-zero3": Examples(
        bad=_run(_QUANTIZED, _ZERO3, **_IS_QUANTIZED),
        good=_run(_QUANTIZED, _ZERO2, **_IS_QUANTIZED),
    ),
    "averaged-weights-below-zero3": Examples(
        bad=_run(_AVERAGES, _ZERO3, **_NOT_OF_TRANSFORMERS, averages="AveragedModel"),
        good=_run(_AVERAGES, _ZERO2, **_NOT_OF_TRANSFORMERS, averages="AveragedModel"),
    ),
    "weights-by-hand-below-zero3": Examples(
        bad=_run(_CLAMPS, _ZERO3, **_NOT_OF_TRANSFORMERS, edits_weights="train.py:18"),
        good=_run(_CLAMPS, _ZERO2, **_NOT_OF_TRANSFORMERS, edits_weights="train.py:18"),
    ),
    "unprepared-models-below-zero3": Examples(
        bad=_run(_STUDENT_AND_TEACHER, _ZERO3, unprepared_models=("LlamaForCausalLM",)),
        good=_run(_STUDENT_AND_TEACHER, _ZERO2, unprepared_models=("LlamaForCausalLM",)),
    ),
    "grouping-needs-lengths": Examples(
        bad=_run(SMALL, replace(_ALONE, group_by_length=True), **_NOT_OF_TRANSFORMERS, lengths=None),
        good=_run(SMALL, **_NOT_OF_TRANSFORMERS, lengths=None),
    ),
    "grouping-needs-shuffled-samples": Examples(
        bad=_run(LANGUAGE, replace(_ALONE, group_by_length=True), loader_sampler="SequentialSampler"),
        good=_run(LANGUAGE, loader_sampler="SequentialSampler"),
    ),
}
