"""Findings across accelerate's file, launch flags, TrainingArguments and the script."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from rule_examples.example import Example
from rule_situations import situation_of_example, situations_of_example

from zerofit.checking.engine import check
from zerofit.checking.rules import ALL_RULES
from zerofit.core.command import Route

_Case = tuple[str, dict[str, Any]]
"""A rule, and the layers of a run that it is asked about."""

_FILE = """\
compute_environment: LOCAL_MACHINE
distributed_type: DEEPSPEED
num_machines: 1
num_processes: 2
"""
_NO_COUNT = _FILE.replace("num_processes: 2\n", "")
_LAUNCH = "accelerate launch --config_file accelerate.yaml"
_SAGEMAKER = "compute_environment: AMAZON_SAGEMAKER\nec2_instance_type: ml.p3.2xlarge\n"


def _lines(lines: str, text: str = _FILE) -> dict[str, Any]:
    return {"accelerate": text + lines}


def _of_accelerate_file() -> list[_Case]:
    texts = {
        "accelerate-unknown-key": (
            *("machine_rnak: 0\n", "ipex_config:\n  ipex: false\n", "zero_stage: 3\n"),
            "num_proceses: 2\n",  # the right spelling is there too
            "fp16: true\n",  # accelerate still reads it
        ),
        "accelerate-ignored-key": (
            "deepspeed_config:\n  zero_stag: 3\n",
            "fsdp_config:\n  fsdp_backward_prefetch_policy: BACKWARD_PRE\n",
            "deepspeed_config:\n  num_processes: 3\n",  # it acts: it goes to the flag
            "fsdp_config:\n  fsdp_ignored_modules: null\n",
            "fsdp_config:\n  version: 2\n",  # accelerate puts fsdp_ before it
        ),
        "accelerate-value-type": (
            *("mixed_precision: no\n", "gpu_ids: 0\n", 'main_process_port: "29511"\n'),
            "deepspeed_config: none\n",
            "deepspeed_config:\n  zero_stage: auto\n",
            "deepspeed_config:\n  zero3_init_flag: maybe\n",
            *("mixed_precision: 'no'\n", "mixed_precision:\n", "machine_rank: '0'\n"),
            "deepspeed_config:\n  gradient_clipping: auto\n  zero3_init_flag: false\n",
            "deepspeed_config:\n  zero3_init_flag: 'Yes'\n",
        ),
        "accelerate-value-choice": (
            "mixed_precision: bf61\n",
            "deepspeed_config:\n  offload_optimizer_device: gpu\n",
            "deepspeed_config:\n  zero_stage: 4\n",
            "main_process_port: 99999\n",
            "mixed_precision: BF16\n",
            "deepspeed_config:\n  offload_optimizer_device: CPU\n",
            "main_process_port: 0\n",
            "dynamo_config:\n  dynamo_backend: nope\n",  # with DeepSpeed it is not read
        ),
        "accelerate-key-needs-flag": (
            "enable_cpu_affinity: true\n",
            "rdzv_backend: static\nenable_cpu_affinity: false\nsame_network: true\n",
        ),
        "accelerate-key-repeated": (
            "num_processes: 4\n",
            "deepspeed_config:\n  zero_stage: 3\n  zero_stage: 1\n",
            "num_processes: 2\n",  # the same value
            "deepspeed_config:\n  zero_stage: 3\n  zero_stage: 3\n",
            "deepspeed_config:\n  zero_stage: 3\nfsdp_config:\n  zero_stage: 3\n",
        ),
    }
    without_deepspeed = _FILE.replace("DEEPSPEED", "'NO'")
    dynamo = [
        ("accelerate-value-choice", "dynamo_config:\n  dynamo_backend: inducter\n"),
        ("accelerate-value-choice", "dynamo_backend: inducter\n"),
        ("accelerate-value-choice", "dynamo_config:\n  backend: Inductor\n"),
        ("accelerate-value-type", "dynamo_config:\n  backend: no\n"),
        ("accelerate-value-type", "dynamo_config:\n  backend:\n"),
    ]
    counted = [
        (_NO_COUNT, _LAUNCH),
        (f"{_NO_COUNT}num_processes: -1\n", _LAUNCH),
        (_NO_COUNT, f"{_LAUNCH} --num_processes 2"),
        (_NO_COUNT.replace("DEEPSPEED", "'NO'"), _LAUNCH),
        (_NO_COUNT, None),  # the command line may say it
    ]
    return [
        *((rule, _lines(lines)) for rule, several in texts.items() for lines in several),
        *((rule, _lines(lines, without_deepspeed)) for rule, lines in dynamo),
        ("accelerate-unknown-key", _lines("", _SAGEMAKER)),
        ("accelerate-needs-distributed-type", _lines("", _SAGEMAKER)),
        *(
            ("accelerate-needs-num-processes", {"accelerate": text, "command": command})
            for text, command in counted
        ),
    ]


_TWO = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "DEEPSPEED", "num_processes": 2}
_ZERO2 = {"zero_optimization": {"stage": 2}}


def _named(keys: dict[str, Any], deepspeed: dict[str, Any], flag: str = "", **top: Any) -> dict[str, Any]:
    file = {**_TWO, **top, "deepspeed_config": {"deepspeed_config_file": "ds_config.json", **keys}}
    command = {"command": f"{_LAUNCH}{flag}"} if flag or top else {}
    return {"accelerate": file, "deepspeed": {**_ZERO2, **deepspeed}, **command}


def _of_deepspeed_section() -> list[_Case]:
    beside = [
        _named({"zero_stage": 3}, {}),  # 2 or 3: nobody but the user knows
        _named({"zero_stage": 2}, {}),
        _named({"gradient_accumulation_steps": 4}, {}),
        _named({"gradient_clipping": 0.5}, {"gradient_clipping": "auto"}),
        _named({"offload_param_device": "none"}, {}),
        _named({"offload_param_device": "cpu"}, {}),
        _named({}, {}, mixed_precision="no"),
        _named({}, {"bf16": {"enabled": True}}, mixed_precision="no"),
        _named({}, {}, mixed_precision="bf16"),
        _named({}, {}, mixed_precision=False),  # the type is mended first
        _named({}, {}, mixed_precision=None),
        _named({}, {}, " --mixed_precision bf16", mixed_precision="bf16"),  # the flag takes the key's place
        _named({"zero3_init_flag": True}, {}),
        _named({"deepspeed_multinode_launcher": "standard"}, {}),
    ]
    files = [
        ("deepspeed-section-without-deepspeed", {"distributed_type": "FSDP", "deepspeed_config": {}}),
        ("deepspeed-section-without-deepspeed", {"distributed_type": "deepspeed"}),
        ("use-cpu-with-deepspeed", {"distributed_type": "MULTI_CPU", "use_cpu": True}),
        ("accelerate-loses-nvme-path", {"deepspeed_config": {"offload_optimizer_device": "cpu"}}),
        ("accelerate-loses-zero-clipping", {"deepspeed_config": {"gradient_clipping": 0.5}}),
        ("accelerate-loses-zero-clipping", {"deepspeed_config": {"gradient_clipping": "auto"}}),
    ]
    by_flag = "--use_deepspeed --zero_stage 3 --offload_param_device nvme --offload_param_nvme_path /nvme"
    dynamo: list[tuple[dict[str, Any], str]] = [
        ({"dynamo_config": {"backend": "inductor"}}, ""),
        ({"dynamo_backend": "EAGER"}, ""),
        ({}, " --dynamo_backend eager"),
        ({"dynamo_backend": "EAGER"}, " --dynamo_backend no"),
        ({"dynamo_backend": "NO"}, ""),
        ({"dynamo_config": {}}, ""),
        ({"dynamo_backend": "EAGER", "distributed_type": "MULTI_GPU"}, ""),
    ]
    return [
        *(("accelerate-keys-beside-deepspeed-file", layers) for layers in beside),
        *((rule, {"accelerate": {**_TWO, **top}}) for rule, top in files),
        ("accelerate-loses-nvme-path", {"command": f"accelerate launch {by_flag}"}),
        *(
            ("dynamo-ignored-with-deepspeed", {"accelerate": {**_TWO, **top}, "command": f"{_LAUNCH}{flag}"})
            for top, flag in dynamo
        ),
    ]


_SCRIPT = """\
from accelerate import Accelerator

accelerator = Accelerator({})
model, optimizer, data = accelerator.prepare(make_model(), make_optimizer(), make_data())
for batch in data:
    with accelerator.accumulate(model):
        accelerator.backward(model(batch).loss)
        optimizer.step()
        optimizer.zero_grad()
"""
_STEPS = "gradient_accumulation_steps"


def _of_accelerator() -> list[_Case]:
    accumulation: list[tuple[str, str, dict[str, Any]]] = [
        ("accumulation-not-in-deepspeed-file", f"{_STEPS}=4", {}),
        ("accumulation-not-in-deepspeed-file", f"{_STEPS}=1", {}),
        ("accumulation-not-in-deepspeed-file", f"{_STEPS}=args.steps", {}),
        ("accumulation-not-in-deepspeed-file", f"{_STEPS}=4", {_STEPS: "auto"}),
        ("accumulation-differs", f"{_STEPS}=4", {_STEPS: 8}),
        ("accumulation-differs", f"{_STEPS}=4", {_STEPS: 4}),
        ("accumulation-differs", "", {_STEPS: 8}),
    ]
    off, against = "mixed-precision-turned-off-in-file", "mixed-precision-against-file"
    precisions: list[tuple[str, str, dict[str, Any]]] = [
        (off, "bf16", {"bf16": {"enabled": False}}),
        (off, "bf16", {"bf16": {"enabled": "auto"}}),
        (off, "bf16", {}),
        (off, "no", {"bf16": {"enabled": False}}),
        (off, "bf16", {"bf16": {"enabled": False}, "fp16": {"enabled": True}}),
        (against, "bf16", {"bf16": {"enabled": False}, "fp16": {"enabled": True}}),
        (against, "fp16", {"bf16": {"enabled": True}}),
        (against, "bf16", {"fp16": {"enabled": "auto"}}),
    ]
    command = "accelerate launch --use_deepspeed --mixed_precision"
    return [
        *(
            (rule, {"script": _SCRIPT.format(keyword), "deepspeed": {**_ZERO2, **deepspeed}})
            for rule, keyword, deepspeed in accumulation
        ),
        *(
            (rule, {"route": Route.ACCELERATE, "command": f"{command} {precision}", "deepspeed": deepspeed})
            for rule, precision, deepspeed in precisions
        ),
    ]


def _of_flags() -> list[_Case]:
    beside: list[tuple[str, dict[str, Any]]] = [
        ("--zero-stage=3", {}),
        ("--gradient_clipping 0.3", {}),
        ("--gradient_clipping 0.3", {"gradient_clipping": "auto"}),
        ("--gradient_clipping 0.3", {"gradient_clipping": 0.3}),
        ("--gradient_accumulation_steps 4", {"gradient_accumulation_steps": 1}),
        ("--gradient_accumulation_steps $STEPS", {}),
        ("--offload_optimizer_device none", {}),
        ("--zero3_save_16bit_model true", {}),  # there is nothing to gather below stage 3
        ("--zero3_init_flag true --mixed_precision bf16", {}),
    ]
    commands = {
        "launch-unknown-flag": (
            "accelerate launch --main_port=29500",
            "accelerate launch --num-processes 2 --tee 3 -m",
            "accelerate launch $FLAGS",
            "torchrun --nproc_pre_node 8 x.py",
            "torchrun --nproc-per 8 --rdzv-id=1 -m x",
            "torchrun --zero_stage 3 x.py",
            "torchrun --use_env x.py",  # of torch.distributed.launch alone
            "torchrun --$MORE --nproc_per_node $N x.py",
            "python -m torch.distributed.launch --use_env x.py",
            "deepspeed --num_gpsu 2 x.py",
            "deepspeed --num-gpus=2 x.py",
            "deepspeed -H/job/hostfile --num_accelerators 2 --bind_cores x.py --num-gpus 2",
        ),
        "launch-flag-value": (
            "accelerate launch --num_processes two",
            "accelerate launch --main_process_port 99999",
            "accelerate launch --num_processes $N --mixed_precision ${P}",
            "accelerate launch --num_processes 2 --monitor_interval 0.5 --gpu_ids 0,1",
        ),
        "launch-flags-exclude-each-other": (
            "accelerate launch --cpu --use_deepspeed",
            "accelerate launch --use_deepspeed --use_deepspeed",
            "deepspeed --include localhost:1,2 --num_gpus 2 x.py",
            "deepspeed --num_nodes 2 -e work1:0 x.py",
            "deepspeed --num_nodes 2 --num_gpus -1 --exclude work1:0 x.py",
            "deepspeed --include localhost:1,2 --num_gpus -1 x.py",
            "deepspeed --include localhost:1,2 x.py",
            "zerofit launch --offload-activations --no-gradient-checkpointing x.py",
            "zerofit launch --no-gradient-checkpointing --checkpoint-every 2 x.py",
            "zerofit launch --checkpoint-every 2 --offload-activations x.py",
        ),
        "visible-devices-ignored": (
            "CUDA_VISIBLE_DEVICES=2,3 deepspeed --num_gpus 2 x.py",
            "env CUDA_VISIBLE_DEVICES=0,1 deepspeed --include localhost:2,3 x.py",
            "CUDA_VISIBLE_DEVICES=2,3 deepspeed --include localhost:3,2 x.py",
            "CUDA_VISIBLE_DEVICES=1,0 deepspeed --num_gpus 2 x.py",
            "CUDA_VISIBLE_DEVICES=0,1,2,3 deepspeed --num_gpus 2 x.py",
            "CUDA_VISIBLE_DEVICES=0,2,1 deepspeed --num_gpus 2 x.py",
            "CUDA_VISIBLE_DEVICES=0,1 deepspeed --num_gpus 4 x.py",
            "CUDA_VISIBLE_DEVICES=2,3 deepspeed --num_gpus 0 x.py",
            "CUDA_VISIBLE_DEVICES=2,3 deepspeed --num_gpus -1 x.py",
            "CUDA_VISIBLE_DEVICES=0,1 deepspeed --exclude localhost:0,1 x.py",
            "CUDA_VISIBLE_DEVICES=$IDS deepspeed --num_gpus 2 x.py",
            "CUDA_VISIBLE_DEVICES=2,3 deepspeed --num_gpus $N x.py",
            "CUDA_VISIBLE_DEVICES=2,3 deepspeed -H hosts --num_gpus 2 x.py",
            "CUDA_VISIBLE_DEVICES=2,3 deepspeed --master_port 29511 x.py",
            "CUDA_VISIBLE_DEVICES=2,3 accelerate launch --num_processes 2 x.py",
        ),
        "launch-flags-without-deepspeed": (
            "accelerate launch --zero_stage 3",
            "accelerate launch --multi_gpu --zero_stage 3 --gradient_clipping 1.0",
            "accelerate launch --use_deepspeed --zero_stage 3",
            "accelerate launch --num_processes 2",
            "torchrun --zero_stage 3",
        ),
    }
    return [
        *(
            ("launch-flags-ignored-beside-deepspeed-file", _named({}, deepspeed, f" {flags}"))
            for flags, deepspeed in beside
        ),
        *((rule, {"command": line}) for rule, several in commands.items() for line in several),
    ]


def _of_machines() -> list[_Case]:
    flags = {
        "multinode-needs-hostfile": (
            *("", "--deepspeed_multinode_launcher standard", "--num_machines 1", "--num_machines $NODES"),
            *("--use_fsdp", "--deepspeed_multinode_launcher slurm"),
        ),
        "multinode-writes-environment": ("--deepspeed_hostfile hosts", ""),
        "num-processes-is-for-all-machines": ("--num_processes 3", "--num_processes 1", "--num_processes $N"),
        "gpu-ids-too-few": (
            *("--num_machines 1 --gpu_ids 0,1", "--num_machines 1 --gpu_ids all"),
            *("--num_machines 1 --gpu_ids $IDS", "--num_machines 1 --gpu_ids 0,1 --num_processes 2"),
            *("--num_machines 1 --gpu_ids 0,1 --num_processes $N", "--num_machines 1 --gpu_ids 0,1 --cpu"),
            "--gpu_ids 0,1",  # of which machine?
        ),
    }
    file = {**_TWO, "num_machines": 2, "num_processes": 8}
    return [
        (rule, {"accelerate": file, "command": f"{_LAUNCH} {more}"})
        for rule, several in flags.items()
        for more in several
    ]


_ADAMW = {"optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": [0.9, 0.95]}}}


def _schedule(kind: str, **params: Any) -> dict[str, Any]:
    return {"scheduler": {"type": kind, "params": params}}


_MAKES = """\
from transformers import Trainer, TrainingArguments
Trainer(args=TrainingArguments("out", {}))
"""


def _of_trainer_by_launch() -> list[_Case]:
    differ, two = "trainer-values-differ", {"zero_stage": 2}
    cases: list[tuple[str, dict[str, Any], str]] = [
        ("gradient_accumulation_steps=2", {"gradient_accumulation_steps": 4}, ""),
        ("gradient_accumulation_steps=4", {"gradient_accumulation_steps": 4}, ""),
        ("gradient_accumulation_steps=2", {"gradient_accumulation_steps": "auto"}, ""),
        ("gradient_accumulation_steps=args.steps", {"gradient_accumulation_steps": 4}, ""),
        ("max_grad_norm=0.3", {"gradient_clipping": 0.5}, ""),
        ("max_grad_norm=0.3", {"gradient_clipping": 0}, ""),  # the plugin leaves it out
        ("max_grad_norm=1", {}, "--gradient_clipping 1.0"),
        ("max_grad_norm=0.5", {}, "--gradient_clipping 1.0"),
        ("", {}, "--mixed_precision bf16"),
        ("fp16=True", {}, "--mixed_precision bf16"),  # Trainer's own
        ("bf16_full_eval=True", {}, "--mixed_precision bf16"),
        ("bf16=args.bf16", {}, "--mixed_precision bf16"),
        ("", {}, "--mixed_precision no"),
        ("deepspeed=config", {}, "--mixed_precision bf16"),
        ("**more", {}, "--mixed_precision bf16"),
        ("", {}, "--mixed_precision bf16 --multi_gpu"),
    ]
    return [
        (
            differ,
            {
                "accelerate": {**_TWO, "deepspeed_config": {**two, **section}},
                "command": f"{_LAUNCH} {flags}",
                "script": _MAKES.format(keywords),
            },
        )
        for keywords, section, flags in cases
    ]


def _of_best_model() -> list[_Case]:
    best = "load_best_model_at_end=True"
    cases = [
        best,
        f"{best}, eval_strategy='epoch'",
        f"{best}, eval_strategy='epoch', save_strategy='epoch'",
        f"{best}, save_strategy='best'",
        f"{best}, eval_strategy='steps', eval_steps=200",
        f"{best}, eval_strategy='steps', eval_steps=250",
        f"{best}, eval_strategy='steps', eval_steps=2, save_steps=1",
        f"{best}, eval_strategy='steps', eval_steps=1, save_steps=3",
        f"{best}, eval_strategy='steps', eval_steps=0.1, save_steps=0.2",
        f"{best}, eval_strategy='steps', logging_steps=300",
        f"{best}, eval_strategy='steps', eval_steps=args.steps",
        f"{best}, eval_strategy=args.strategy",
        f"{best}, eval_strategy=IntervalStrategy.EPOCH",
        f"{best}, **more",
        f"{best}, evaluation_strategy='steps'",  # another rule's
        f"{best}, eval_strategy='steps', save_only_model=True",
        "load_best_model_at_end=False, eval_strategy='epoch'",
    ]
    of_flags = (
        "--load_best_model_at_end --eval_strategy steps --eval_steps 200 --save_strategy steps --save_steps"
    )
    rule, deepspeed = "best-model-needs-checkpoints", {"zero_optimization": {"stage": 2}}
    return [
        *((rule, {"script": _MAKES.format(keywords)}) for keywords in cases),
        (rule, {"script": _MAKES.format(cases[-2]), "deepspeed": deepspeed}),
        *((rule, {"route": Route.TRAINER, "arguments": f"{of_flags} {steps}"}) for steps in ("500", "400")),
    ]


_EVALUATES = """\
from transformers import EarlyStoppingCallback, IntervalStrategy, Trainer, TrainingArguments
{}
"""


def _of_evaluations() -> list[_Case]:
    epochs = 'args = TrainingArguments("out", eval_strategy="epoch")\n'
    data = [
        f"{epochs}Trainer(args=args, train_dataset=rows)",
        f"{epochs}if __name__ == '__main__':\n    Trainer(args=args, train_dataset=rows)",
        f"{epochs}Trainer(args=args, train_dataset=rows, eval_dataset=others)",
        f"{epochs}Trainer(args=args, train_dataset=rows, **more)",
        f"{epochs}Trainer(model, args, collate, rows, others)",
        f"{epochs}if args.train:\n    Trainer(args=args, train_dataset=rows)",
        f"{epochs}class Own(Trainer):\n    pass\nOwn(args=args, train_dataset=rows)",
        f"{epochs}Trainer(args=TrainingArguments('out'), train_dataset=rows)",
        'Trainer(args=TrainingArguments("out"), train_dataset=rows)',
        'Trainer(args=TrainingArguments("out", eval_strategy=args.strategy), train_dataset=rows)',
        'Trainer(args=TrainingArguments("out", eval_strategy=IntervalStrategy.NO), train_dataset=rows)',
    ]
    stops, steps = "callbacks=[EarlyStoppingCallback(early_stopping_patience=3)]", "eval_strategy='steps'"
    stopping = [
        "",
        steps,
        f"{steps}, lr_scheduler_type='cosine'",
        f"{steps}, metric_for_best_model='loss'",
        f"{steps}, metric_for_best_model=args.metric",
        f"{steps}, load_best_model_at_end=True",
        f"{steps}, lr_scheduler_type='reduce_lr_on_plateau'",
        f"{steps}, lr_scheduler_type=args.schedule",
        f"{steps}, **more",
        "evaluation_strategy='steps'",  # another rule's
    ]
    made = f'args = TrainingArguments("out", {{}})\nTrainer(args=args, {stops})'
    stopped = [
        *map(made.format, stopping),
        "args = TrainingArguments('out')\nTrainer(args=args)\nif stops:\n    EarlyStoppingCallback()",
    ]
    return [
        *(("evaluation-needs-dataset", {"script": _EVALUATES.format(lines)}) for lines in data),
        *(("early-stopping-needs-metric", {"script": _EVALUATES.format(lines)}) for lines in stopped),
    ]


def _of_checkpointing() -> list[_Case]:
    sections = (
        {"cpu_checkpointing": True, "profile": True},
        {"partition_activations": False, "profile": True},
    )
    return [
        (
            "activation-checkpointing-unread",
            {"route": route, "deepspeed": {"activation_checkpointing": section}},
        )
        for route in (Route.TRAINER, Route.ACCELERATE, None)
        for section in sections
    ]


def _of_trainer() -> list[_Case]:
    differ, overridden = "trainer-values-differ", "trainer-argument-overridden"
    cases: list[tuple[str, str, dict[str, Any]]] = [
        (differ, "--learning_rate 2e-5", {"optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}}),
        (differ, "--per_device_train_batch_size 8", {"train_micro_batch_size_per_gpu": "8"}),
        (differ, "--bf16", {"bf16": {"enabled": "true"}}),
        (differ, "--bf16", {"bf16": {"enabled": False}}),
        (differ, "--bf16 True", {"bf16": {"enabled": True}}),
        (differ, "--bf16_full_eval --bf16 no", {"bf16": {"enabled": True}}),
        (differ, "--max_grad_norm 1", {"gradient_clipping": 1.0}),
        (
            differ,
            "--per_device_train_batch_size 8 --auto_find_batch_size",
            {"train_micro_batch_size_per_gpu": 2},
        ),
        (differ, "--adam_beta1 0.9 --adam_beta2 0.999", _ADAMW),
        (differ, "--adam_beta2 0.95", _ADAMW),  # adam_beta1 is not known
        (differ, "--warmup_steps 10", _schedule("WarmupLR", warmup_num_steps=100)),
        (differ, "--warmup_steps 0.1", _schedule("WarmupLR", warmup_num_steps=100)),
        (differ, "--adam_beta1 $B1 --adam_beta2 $B2", _ADAMW),
        ("trainer-clipping-not-in-file", "--max_grad_norm 1.0", {}),
        (overridden, "--optim $OPTIM", _ADAMW),
        (overridden, "--optim $OPTIM --lr_scheduler_type cosine", {**_ADAMW, **_schedule("WarmupLR")}),
        (overridden, "--optim adamw_torch --lr_scheduler_type cosine", {**_ADAMW, **_schedule("WarmupLR")}),
        (overridden, "--lr_scheduler_type cosine", {"scheduler": {"type": "WarmupLR"}}),
        (overridden, "--optim adamw_torch", _ADAMW),
        (overridden, "--lr_scheduler_type linear", {"scheduler": {"type": "WarmupDecayLR"}}),
        ("trainer-takes-one-half-precision", "--bf16 --fp16 false", {}),
        ("trainer-takes-one-half-precision", "--bf16_full_eval --fp16-full-eval", {}),
        ("trainer-unknown-optimizer", "--optim $OPTIM", {}),
        ("trainer-unknown-optimizer", "--optim adamw_8bits", {}),
        ("training-argument-unknown", "--my_own_argument 3 --gradient_checkpointing", {}),
        ("training-argument-unknown", "--warmup_ratio 0.1", {}),
        ("training-argument-unknown", "--evaluation_strategy steps", {}),
    ]
    auto = {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"}
    foreign = {"route": Route.ACCELERATE, "deepspeed": {**auto, **_ADAMW}}
    foreign["arguments"] = "--learning_rate 1 --optim adamw_hf --warmup_ratio 0.1"
    of_others = (differ, "trainer-unknown-optimizer", "training-argument-unknown")
    return [
        *(
            (rule, {"route": Route.TRAINER, "deepspeed": {**auto, **deepspeed}, "arguments": arguments})
            for rule, arguments, deepspeed in cases
        ),
        *((rule, foreign) for rule in of_others),  # arguments of a script without Trainer are its own
    ]


def _said(rule: str, layers: dict[str, Any]) -> str:
    """Return the layers, and all that one rule says of them."""
    (only,) = [one for one in ALL_RULES if one.id == rule]
    found = situations_of_example(Example(**layers))
    findings = [finding for situation in found for finding in check(situation, rules=[only]).findings]
    lines = [f"{rule} of {json.dumps(layers)}"]
    lines += [line for finding in findings for line in (finding.as_text(), *map(repr, finding.edits))]
    return "\n".join(lines) + "\n\n"


@pytest.mark.parametrize(
    "cases",
    [
        *(_of_accelerate_file, _of_deepspeed_section, _of_accelerator, _of_flags, _of_machines),
        *(_of_trainer, _of_trainer_by_launch, _of_best_model, _of_evaluations, _of_checkpointing),
    ],
)
def test_what_a_rule_says(cases: Callable[[], list[_Case]], golden: Callable[[str, str], None]) -> None:
    said = [_said(rule, layers) for rule, layers in cases()]
    golden("".join(said), f"findings/layers{cases.__name__.removeprefix('_of')}.txt")


@pytest.mark.parametrize("line", ["", "num_processes: -1\n"])
def test_without_the_command_line_nobody_knows_whether_it_says_num_processes(line: str) -> None:
    example = Example(accelerate=_FILE.replace("num_processes: 2\n", line), command="accelerate launch")
    rules = [rule for rule in ALL_RULES if rule.id == "accelerate-needs-num-processes"]
    verdict = check(replace(situation_of_example(example), command=None), rules=rules)
    assert verdict.findings == ()
    assert [item.fact for item in verdict.unknown] == ["the command line, which may have --num_processes"]
