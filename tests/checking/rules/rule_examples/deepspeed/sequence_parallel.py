"""Examples of the rules of zerofit/checking/rules/deepspeed/sequence_parallel.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rule_examples.deepspeed.tensor_parallel import ZERO2
from rule_examples.example import LANGUAGE, TWO_RANKS, Example, Examples, at_zero, zero
from zerofit.core.plan import Topology
from zerofit.core.strategy import Strategy

_SECTION = "parallelism_config"
_GROUP = Topology(world_size=2, sequence_parallel_size=2)
_TRAINED = """\
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Trainer, TrainingArguments, set_seed

set_seed(0)
arguments = TrainingArguments(
    "out",
    max_steps=4,
    per_device_train_batch_size=2,
    learning_rate=0.01,
    lr_scheduler_type="constant",
    max_grad_norm=0.0,
    train_sampling_strategy="sequential",
    save_strategy="no",
    report_to="none",
    disable_tqdm=True,
)
config = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
)
model = AutoModelForCausalLM.from_config(config)
tokens = torch.randint(0, 64, (16, 8), generator=torch.Generator().manual_seed(0))
samples = [{"input_ids": row, "labels": row, "position_ids": torch.arange(8)} for row in tokens]
Trainer(model=model, args=arguments, train_dataset=samples).train()
"""


def _file(**parallelism: Any) -> dict[str, Any]:
    section = {"sp_size": 2, "sp_backend": "deepspeed", "sp_attn_implementation": "sdpa", **parallelism}
    return {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "DEEPSPEED",
        "deepspeed_config": {"deepspeed_config_file": "ds_config.json"},
        "num_machines": 1,
        "num_processes": 2,
        "use_cpu": False,
        _SECTION: {f"{_SECTION}_{name}": value for name, value in section.items() if value is not None},
    }


_CUT = zero(
    2,
    tensor_parallel={"autotp_size": 2},
    zero_optimization={"stage": 2, "stage3_gather_16bit_weights_on_model_save": True},
)
_WITHOUT = {name: value for name, value in _file().items() if name != _SECTION}


EXAMPLES = {
    "sequence-parallel-needs-deepspeed": Examples(
        bad=Example(strategy=Strategy(), topology=_GROUP),
        good=Example(strategy=ZERO2, topology=TWO_RANKS),
    ),
    "sequence-parallel-groups-not-whole": Examples(
        bad=at_zero(2, LANGUAGE, accelerate=_file(sp_size=4), topology=TWO_RANKS),
        good=at_zero(2, LANGUAGE, accelerate=_WITHOUT, topology=TWO_RANKS),
    ),
    "parallelism-flags-beside-deepspeed": Examples(
        bad=at_zero(
            2,
            LANGUAGE,
            command="accelerate launch --use_deepspeed --deepspeed_config_file ds_config.json "
            "--use_parallelism_config --parallelism_config_sp_size 2",
        ),
        good=at_zero(
            2, LANGUAGE, command="accelerate launch --use_deepspeed --deepspeed_config_file ds_config.json"
        ),
    ),
    "sequence-parallel-micro-batch": Examples(
        bad=at_zero(2, _TRAINED, accelerate=_file()),
        good=at_zero(2, _TRAINED, accelerate=_WITHOUT),
    ),
    "sequence-parallel-attention-unknown": Examples(
        bad=Example(strategy=replace(ZERO2, attention="eager"), topology=_GROUP, script=LANGUAGE),
        good=Example(strategy=replace(ZERO2, attention="eager"), topology=TWO_RANKS, script=LANGUAGE),
    ),
    "sequence-parallel-with-context-parallel": Examples(
        bad=at_zero(2, LANGUAGE, accelerate=_file(cp_size=2)),
        good=at_zero(2, LANGUAGE, accelerate=_WITHOUT),
    ),
    "sequence-parallel-with-tensor-parallel": Examples(
        bad=Example(deepspeed=_CUT, accelerate=_file(), script=LANGUAGE),
        good=at_zero(2, LANGUAGE, accelerate=_WITHOUT),
    ),
    "deepspeed-sequence-groups-not-summed": Examples(
        bad=Example(deepspeed=zero(2, sequence_parallel_size=2, data_parallel_size=1), script=LANGUAGE),
        good=at_zero(2, LANGUAGE),
    ),
    "deepspeed-sequence-parallel-size-ignored": Examples(
        bad=Example(deepspeed=zero(2, sequence_parallel_size=2), script=LANGUAGE),
        good=at_zero(2, LANGUAGE),
    ),
    "sequence-parallel-over-nodes": Examples(
        bad=Example(strategy=ZERO2, topology=Topology(num_nodes=2, world_size=8, sequence_parallel_size=8)),
        good=Example(strategy=ZERO2, topology=Topology(num_nodes=2, world_size=8, sequence_parallel_size=4)),
    ),
}
