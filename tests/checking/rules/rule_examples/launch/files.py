"""Examples of the rules of zerofit/checking/rules/launch/files.py."""

from __future__ import annotations

from rule_examples.example import EVALUATES, Example, Examples, changed, config, native

_CONFIG = '{"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 2}}'
_LAUNCH = (
    "distributed_type: DEEPSPEED\nnum_machines: 1\nnum_processes: 2\ndeepspeed_config:\n  zero_stage: 2\n"
)


def _naming(name: str) -> Example:
    launch = {"distributed_type": "DEEPSPEED", "deepspeed_config": {"deepspeed_config_file": name}}
    return Example(deepspeed=config(2), accelerate={**launch, "num_processes": 2})


_SHARDED = changed(EVALUATES, 'deepspeed="ds_config.json"', 'fsdp=True, fsdp_config="fsdp.json"')
_SHARDED = changed(_SHARDED, "trainer.evaluate()\n", "")


def _by_file(text: str) -> Example:
    return Example(command="torchrun --nproc_per_node 2", script=_SHARDED, fsdp=text)


EXAMPLES = {
    "deepspeed-syntax": Examples(
        bad=native(_CONFIG[:-1]),
        good=native(_CONFIG),
    ),
    "accelerate-syntax": Examples(
        bad=Example(accelerate="fsdp_config: {\n" + _LAUNCH),
        good=Example(accelerate=_LAUNCH),
    ),
    "fsdp-config-syntax": Examples(
        bad=_by_file('{"version": 2,}'),
        good=_by_file('{"version": 2}'),
    ),
    "script-syntax": Examples(
        bad=Example(script='print("weights"\n'),
        good=Example(script='print("weights")\n'),
    ),
    "named-file-missing": Examples(
        bad=_naming("ds_zero2.json"),
        good=_naming("ds_config.json"),
    ),
    "launched-script-missing": Examples(
        bad=Example(command="accelerate launch --num_processes 2", lacks_script=True),
        good=Example(command="accelerate launch --num_processes 2", script='print("weights")\n'),
    ),
    "launch-line-broken": Examples(
        bad=Example(shell="accelerate launch --num_processes 2 \\ \n    train.py --epochs 3\n"),
        good=Example(shell="accelerate launch --num_processes 2 \\\n    train.py --epochs 3\n"),
    ),
}
