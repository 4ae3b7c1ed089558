"""Ten published runs: what zerofit, `accelerate estimate-memory` and DeepSpeed's estimators say of each.

Writes measured/side_by_side.json where all ten were asked about. The other two know neither lengths, batches
nor adapters: accelerate multiplies the weights, DeepSpeed counts model states. DeepSpeed's are asked only
about runs under DeepSpeed, at the run's stage.
"""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

from published import CASES, parse_names, predict

from zerofit.core.units import GIB
from zerofit.models.find import probe_model
from zerofit.models.task import Task

_NAMES = (
    "hf-bertL-vanilla",
    "hf-bertL-ga",
    "hf-bertL-fp16",
    "hf-bertL-adafactor-all",
    "litgpt-11",
    "litgpt-16",
    "peft-lora--llama-3.2-3B-rank64-rslora",
    "qwen-030",
    "qwen-043",
    "qwen-050",
)


def main() -> None:
    """Print the table and write it down."""
    names = parse_names(__doc__)
    sources = tomllib.loads(CASES.read_text(encoding="utf-8"))["source"]
    rows = {row["id"]: (source["name"], {**source, **row}) for source in sources for row in source["rows"]}
    table = [_compare(*rows[name]) for name in names or _NAMES]
    columns = ("measured", "zerofit", "accelerate", "deepspeed")
    print(f"{'GiB':40}" + "".join(f"{column:>12}" for column in columns))
    for line in table:
        print(f"{line['id']:40}" + "".join(f"{line[column] or '-':>12}" for column in columns))
    if not names:
        text = json.dumps(table, indent=1) + "\n"
        (Path(__file__).parent / "measured" / "side_by_side.json").write_text(text, encoding="utf-8")


def _compare(source: str, row: dict[str, Any]) -> dict[str, Any]:
    case = predict(source, row)
    facts = probe_model(row["model"], task=Task(row["task"])).facts
    ranks = row.get("ranks", 1)
    return {
        "id": case.name,
        "measured": _gib(case.measured_bytes or 0),
        "zerofit": _gib(case.predicted_bytes),
        "accelerate": _gib(_accelerate(facts.num_parameters, row["precision"])),
        "deepspeed": _gib(_deepspeed(facts, row["zero_stage"], ranks)) if "zero_stage" in row else None,
    }


def _accelerate(num_parameters: int, precision: str) -> int:
    """Return the largest of what `accelerate estimate-memory` prints for training with Adam."""
    from accelerate.commands.estimate import estimate_training_usage

    word = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}[precision]
    return int(max(estimate_training_usage(4 * num_parameters, word).values()))


def _deepspeed(facts: Any, stage: int, ranks: int) -> int:
    """Return the device memory that DeepSpeed's own estimators state, without offload."""
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs

    if stage == 3:
        _, on_gpu, _ = estimate_zero3_model_states_mem_needs(
            facts.num_parameters, facts.largest_parameter, num_gpus_per_node=ranks, cpu_offload=False
        )
    else:
        _, on_gpu = estimate_zero2_model_states_mem_needs(
            facts.num_parameters, num_gpus_per_node=ranks, cpu_offload=False
        )
    return int(on_gpu)


def _gib(num_bytes: int) -> float:
    return round(num_bytes / GIB, 1)


if __name__ == "__main__":
    main()
