"""Examples of the rules of zerofit/checking/rules/deepspeed/early_reads.py."""

from __future__ import annotations

from rule_examples.example import LANGUAGE, LOADED, TWO_RANKS, Example, Examples, changed, zero

_SETS_UP = "accelerator = Accelerator()\n"
_MAKES_MODEL = "model = AutoModelForCausalLM.from_config(config)\n"
_KEEPS = 'zero3 = HfDeepSpeedConfig("ds_config.json")\n'
_IMPORT = ("set_seed\n", "set_seed\nfrom transformers.integrations import HfDeepSpeedConfig\n")
_READS = changed(LANGUAGE, _SETS_UP, "")
_READS = changed(_READS, *_IMPORT)
_READS = changed(_READS, _MAKES_MODEL, f"{_KEEPS}{_MAKES_MODEL}{_SETS_UP}")
"""The model is partitioned by the file as it is written, before Accelerator() reads it."""
_LOADS = 'model = AutoModelForCausalLM.from_pretrained("model")\n'
_KEPT = changed(changed(LOADED, *_IMPORT), f"{_SETS_UP}{_LOADS}", f"{_KEEPS}{_LOADS}{_SETS_UP}")
_DROPPED = changed(_KEPT, _KEEPS, _KEEPS.removeprefix("zero3 = "))
_AUTO = zero(3, train_micro_batch_size_per_gpu="auto")
_OPEN = {**_AUTO, "gradient_accumulation_steps": "auto"}
_WHOLE_BATCH = zero(3, train_batch_size=4)


EXAMPLES = {
    "zero-init-reads-auto": Examples(
        bad=Example(deepspeed=_AUTO, script=_READS),
        good=Example(deepspeed=_AUTO, script=LANGUAGE),
    ),
    "zero-init-counts-one-rank": Examples(
        bad=Example(deepspeed=_WHOLE_BATCH, script=_READS, topology=TWO_RANKS),
        good=Example(deepspeed=_WHOLE_BATCH, script=LANGUAGE, topology=TWO_RANKS),
    ),
    "accelerate-zero-init-takes-1": Examples(
        bad=Example(deepspeed=_OPEN | {"train_batch_size": 4}, script=LANGUAGE, topology=TWO_RANKS),
        good=Example(deepspeed=_OPEN | {"train_batch_size": "auto"}, script=LANGUAGE, topology=TWO_RANKS),
    ),
    "hf-config-not-kept": Examples(
        bad=Example(deepspeed=zero(3), script=_DROPPED),
        good=Example(deepspeed=zero(3), script=_KEPT),
    ),
}
