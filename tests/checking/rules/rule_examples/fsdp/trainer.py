"""Examples of the rules of zerofit/checking/rules/fsdp/trainer.py."""

from __future__ import annotations

from rule_examples.example import EVALUATES, Example, Examples, changed

_RANKS = "torchrun --nproc_per_node 2"
_TRAINS = changed(EVALUATES, "trainer.evaluate()\n", "")
_NO_SAVES = 'save_strategy="no", '
_BEST = """\
    save_steps=2, eval_steps=2, eval_strategy="steps", load_best_model_at_end=True, save_only_model=True,
    fsdp=True,
)
"""
_SAVES = 'trainer.save_model("final")\n'


def _with(arguments: str, end: str = "") -> str:
    """Return the script with other arguments in place of DeepSpeed's, and more lines at its end."""
    return changed(_TRAINS, 'deepspeed="ds_config.json", ', f"{arguments}, " if arguments else "") + end


def _under(arguments: str, end: str = "", command: str = _RANKS) -> Example:
    return Example(command=command, script=_with(arguments, end))


_SHARDED = _under("fsdp=True")
_WHOLE, _PARTS = (
    f'fsdp=True, fsdp_config={{"state_dict_type": "{kind}_STATE_DICT"}}' for kind in ("FULL", "SHARDED")
)
_DEEPSPEED = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 1,
    "zero_optimization": {"stage": 2},
}
_ONLY_BEST = changed(_with(""), _NO_SAVES, "")
_ONLY_BEST = changed(_ONLY_BEST, ")\nset_seed", f"{_BEST}set_seed")


EXAMPLES = {
    "fsdp-config-without-fsdp": Examples(bad=_under('fsdp_config={"version": 2}'), good=_SHARDED),
    "fsdp-config-key-unknown": Examples(
        bad=_under('fsdp=True, fsdp_config={"sharding_strategy": "SHARD_GRAD_OP"}'),
        good=_under('fsdp=True, fsdp_config={"reshard_after_forward": False}'),
    ),
    "fsdp-word-refused": Examples(
        bad=_under('fsdp="full_shard,auto_wrap"'), good=_under('fsdp="full_shard auto_wrap"')
    ),
    "fsdp-excludes-deepspeed": Examples(
        bad=Example(
            command=_RANKS, deepspeed=_DEEPSPEED, script=_with('deepspeed="ds_config.json", fsdp=True')
        ),
        good=_SHARDED,
    ),
    "fsdp-needs-ranks": Examples(bad=_under("fsdp=True", command="python"), good=_SHARDED),
    "fsdp-checkpoints-twice": Examples(
        bad=_under(
            'fsdp=True, fsdp_config={"activation_checkpointing": True}, activation_checkpointing=True'
        ),
        good=_under('fsdp=True, fsdp_config={"activation_checkpointing": True}'),
    ),
    "fsdp-sharded-save-only-model": Examples(
        bad=_under(f"{_PARTS}, save_only_model=True"), good=_under(f"{_WHOLE}, save_only_model=True")
    ),
    "fsdp-best-model-needs-states": Examples(
        bad=Example(command=_RANKS, script=_ONLY_BEST), good=_under("fsdp=True, save_only_model=True")
    ),
    "fsdp-sharded-save-has-no-weights": Examples(bad=_under(_PARTS, _SAVES), good=_under(_WHOLE, _SAVES)),
    "fsdp-trainer-makes-optimizer": Examples(
        bad=Example(
            command=_RANKS,
            script=changed(
                _with("fsdp=True"),
                "eval_dataset=rows)",
                "eval_dataset=rows, optimizers=(torch.optim.AdamW(model.parameters(), lr=1e-2), None))",
            ),
        ),
        good=_SHARDED,
    ),
    "fsdp-save-model-needs-all-ranks": Examples(
        bad=_under("fsdp=True", 'if trainer.is_world_process_zero():\n    trainer.save_model("final")\n'),
        good=_under("fsdp=True", _SAVES),
    ),
}
