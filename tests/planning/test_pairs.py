"""A plan for a preference loss counts both rows of each pair, and the reference model beside the trained one.

That the live tensors of such a step are those of the real one is in tests/models/trace/test_script_loss.py.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from runs import run_command
from transformers import LlamaConfig, LlamaForCausalLM

from zerofit.core.plan import plan_from_json
from zerofit.core.strategy import Engine

if TYPE_CHECKING:
    from pathlib import Path

_PAIRS, _LENGTH = 8, 512
_SIZES = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 128}
_SCRIPT = f"""
import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

class Preferences(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        chosen, rejected = model(**inputs).logits.mean((1, 2)).chunk(2)
        with torch.no_grad():
            other = self.reference(**inputs).logits.mean((1, 2)).chunk(2)
        return (rejected - chosen - other[1] + other[0]).mean()

def pairs(samples):
    return {{"input_ids": torch.stack([one[side] for side in ("chosen", "rejected") for one in samples])}}

rows = [{{"chosen": torch.ones({_LENGTH}).long(), "rejected": torch.ones({_LENGTH}).long()}}] * 64
arguments = TrainingArguments(
    "out", per_device_train_batch_size={_PAIRS}, max_steps=4, remove_unused_columns=False, report_to=[]
)
trainer = Preferences(
    AutoModelForCausalLM.from_pretrained("llama"), arguments, train_dataset=rows, data_collator=pairs
)
trainer.reference = AutoModelForCausalLM.from_pretrained("llama").eval()
trainer.train()
"""


def _terms(plan: Any, phase: str) -> dict[str, Any]:
    (found,) = [one for one in plan.estimate.device.phases if one.phase.value == phase]
    return {term.name: term for term in found.terms}


def test_a_preference_loss_is_planned_with_all_rows_and_its_reference_model(tmp_path: Path) -> None:
    config = LlamaConfig(vocab_size=128, use_cache=False, dtype="float32", **_SIZES)
    model = LlamaForCausalLM(config)
    model.save_pretrained(tmp_path / "llama")
    (tmp_path / "train.py").write_text(_SCRIPT)
    flags = ("--gpus", "1xH100", "--mixed-precision", "no", "--no-gradient-checkpointing")
    command = (sys.executable, "-m", "zerofit", "plan", *flags, "--output", "plan.json", "train.py")
    run_command(command, tmp_path, XDG_CACHE_HOME=str(tmp_path / "cache")).check()
    plan = plan_from_json((tmp_path / "plan.json").read_text(), name="plan.json")
    strategy = plan.strategy
    assert (strategy.engine, strategy.micro_batch_size) == (Engine.NATIVE, _PAIRS)  # as it is: not split
    assert plan.estimate.tokens_per_step == 2 * _PAIRS * _LENGTH
    forward = _terms(plan, "forward")
    assert forward["inputs"].num_bytes == 2 * _PAIRS * _LENGTH * 8
    assert forward["activations"].formula == (
        "live tensors: fixed + bytes per sample (2 rows at the model) x micro_batch_size"
    )
    # The reference model has as many weights, and lies on the GPU too.
    others = forward["other models of the script"]
    assert others.num_bytes == forward["weights"].num_bytes >= 4 * model.num_parameters()
    assert others.source.endswith("of their activations, those of a Trainer's loss are traced")
