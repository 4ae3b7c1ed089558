#!/usr/bin/env python3
"""Plans of problems drawn by a seed, to compare the planner before and after a change.

    python benchmarks/plan_problems.py plans.jsonl           # in each of the two trees
    python benchmarks/plan_problems.py --compare before.jsonl after.jsonl

A problem is a command line: `zerofit plan` of a model of the catalog by closed forms or by a trace, or `plan`
and `launch --dry-run` of one of three scripts, alone or in a launch line with configuration files. Its record
has the words, the exit code, and what was printed. The problems are the same in both trees, since only the
seed decides; a verb that a tree lacks shows as a difference.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

SEED = 20261129
NUM_FAST, NUM_TRACED, NUM_SCRIPTS = 230, 30, 60
_MODELS = (
    *("bert-base-uncased", "bert-large-uncased", "gpt2", "gpt2-xl", "t5-base", "llama-2-7b", "llama-3-8b"),
    *("mistral-7b", "qwen2.5-7b", "llama-2-13b", "llama-3-70b", "pythia-1b", "mixtral-8x7b"),
)
_TRACED = ("bert-base-uncased", "gpt2", "t5-base", "pythia-1b", "llama-2-7b")
_GPUS = ("1xT4", "1x4090", "2x4090", "1xA100-40G", "4xA100-40G", "8xA100-80G", "8xH100", "2xV100-32G")
_LENGTHS = ("128", "512", "1024", "2048")
_BATCHES = ("1", "8", "12", "64", "96")
_FLAGS: tuple[tuple[str, ...], ...] = (
    *(("--zero-stage", stage) for stage in "0123"),
    *(("--mixed-precision", word) for word in ("bf16", "fp16", "no")),
    *(("--offload-optimizer", word) for word in ("cpu", "nvme")),
    ("--offload-param", "cpu"),
    ("--engine", "native"),
    ("--engine", "deepspeed"),
    ("--micro-batch-size", "2"),
    ("--gradient-accumulation-steps", "2"),
    ("--gradient-checkpointing",),
    ("--no-gradient-checkpointing",),
    ("--checkpoint-every", "2"),
    *(("--optimizer", word) for word in ("adamw", "adamw-8bit", "adafactor", "sgd")),
    ("--lora",),
    ("--qlora",),
    ("--freeze", "embeddings"),
    ("--allow", "lora,adafactor"),
    ("--allow", "qlora,length,freeze"),
    ("--reserve", "2G"),
    ("--tensor-parallel-size", "2"),
    ("--sequence-parallel-size", "2"),
    ("--pipeline-parallel-size", "2"),
    ("--num-processes", "2"),
    ("--num-machines", "2"),
    ("--prefer-speed",),
    ("--expandable-segments",),
    ("--host-ram", "128G"),
    ("--nvme", "2T"),
)
_DEEPSPEED: tuple[dict[str, Any], ...] = (
    {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}},
    {"zero_optimization": {"stage": 3}, "bf16": {"enabled": "auto"}, "gradient_clipping": 1.0},
    {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}},
    {"zero_optimization": {"stage": 1}, "gradient_accumulation_steps": 2, "fp16": {"enabled": True}},
)
_ACCELERATE = (
    "distributed_type: MULTI_GPU\nmixed_precision: bf16\nnum_processes: 4\n",
    "distributed_type: DEEPSPEED\nmixed_precision: bf16\nnum_processes: 8\n"
    "deepspeed_config:\n  zero_stage: 3\n",
    "distributed_type: DEEPSPEED\nnum_processes: 4\ndeepspeed_config:\n"
    "  zero_stage: 2\n  offload_optimizer_device: cpu\n  gradient_clipping: 1.0\n",
    "distributed_type: DEEPSPEED\nnum_processes: 4\ndeepspeed_config:\n  deepspeed_config_file: ds-1.json\n",
)
_LOOP = """\
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

accelerator = Accelerator({options})
config = LlamaConfig(hidden_size={width}, intermediate_size={width} * 3, num_hidden_layers={layers},
                     num_attention_heads=8, num_key_value_heads=8, vocab_size=32000)
model = LlamaForCausalLM(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
rows = [{{"input_ids": torch.ones(256, dtype=torch.long), "labels": torch.ones(256, dtype=torch.long)}}] * 320
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(rows, batch_size=8))
for batch in loader:
    accelerator.backward(model(**batch).loss)
    optimizer.step()
    optimizer.zero_grad()
"""
_TRAINER = """\
import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

model = BertForSequenceClassification(BertConfig(num_hidden_layers=4))
rows = [{"input_ids": torch.ones(128, dtype=torch.long), "labels": torch.tensor(1)}] * 320
arguments = TrainingArguments("out", per_device_train_batch_size=8, report_to=[], save_strategy="no")
Trainer(model, arguments, train_dataset=rows).train()
"""
_SCRIPTS = {
    "small.py": _LOOP.format(options="", width=512, layers=4),
    "large.py": _LOOP.format(options="mixed_precision='bf16'", width=4096, layers=32),
    "trainer.py": _TRAINER,
}
_VOLATILE = ("versions", "machine")
"""Keys of a plan's JSON that are the machine's, not the planner's."""


def problems(seed: int) -> Iterator[tuple[str, ...]]:
    """Yield the command lines."""
    draw = Random(seed)
    for number in range(NUM_FAST + NUM_TRACED):
        fast = number < NUM_FAST
        flags = [flag for chosen in draw.sample(_FLAGS, draw.choice((0, 1, 1, 2, 3))) for flag in chosen]
        yield (
            *("plan", *(("--fast",) if fast else ()), "--json"),
            *(
                "--model",
                draw.choice(_MODELS if fast else _TRACED),
                "--seq-len",
                draw.choice(_LENGTHS[:2] if not fast else _LENGTHS),
            ),
            *("--global-batch-size", draw.choice(_BATCHES), "--gpus", draw.choice(_GPUS), *flags),
        )
    of_files = (
        *(("--config-file", f"acc-{number}.yaml") for number in range(len(_ACCELERATE))),
        *(("--deepspeed-config-file", f"ds-{number}.json") for number in range(len(_DEEPSPEED))),
        (),
    )
    for _ in range(NUM_SCRIPTS // 2):
        files, script = draw.choice(of_files), draw.choice(tuple(_SCRIPTS))
        gpus = ("--gpus", draw.choice(_GPUS[4:7]))
        own = [flag for chosen in draw.sample(_FLAGS[:7], draw.choice((0, 0, 1))) for flag in chosen]
        line = ("accelerate", "launch", *(flag.replace("-", "_").replace("__", "--", 1) for flag in files))
        target = (*line, script) if draw.random() < 0.5 else (*files, script)
        yield ("plan", "--json", *gpus, *own, *target)
        yield ("launch", "--dry-run", *gpus, *own, *target)


def record(words: tuple[str, ...]) -> dict[str, Any]:
    """Return what a command line printed, and how it ended."""
    from zerofit.cli.main import main

    out, err = io.StringIO(), io.StringIO()
    sys.argv = ["zerofit", *words]
    exit_code: Any = 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as end:
            exit_code = end.code or 0
    text: Any = out.getvalue()
    with contextlib.suppress(ValueError):
        text = json.loads(text)
        for plan in text["plans"]:
            for name in _VOLATILE:
                del plan[name]
    return {"words": words, "exit": exit_code, "stdout": text, "stderr": err.getvalue()}


def write(path: Path, seed: int, only: str) -> None:
    """Write the records of all problems."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "110"}
    path = path.absolute()
    with tempfile.TemporaryDirectory() as folder, path.open("w") as file:
        os.chdir(folder)
        os.environ["XDG_CACHE_HOME"] = os.environ["HF_HOME"] = f"{folder}/cache"
        for number, deepspeed in enumerate(_DEEPSPEED):
            Path(f"ds-{number}.json").write_text(json.dumps(deepspeed, indent=2))
        for number, text in enumerate(_ACCELERATE):
            Path(f"acc-{number}.yaml").write_text(text)
        for name, source in _SCRIPTS.items():
            Path(name).write_text(source)
        for words in problems(seed):
            if only in " ".join(words):
                file.write(json.dumps(record(words)) + "\n")
                file.flush()
        os.chdir("/")


def differences(before: Any, after: Any, place: str = "") -> Iterator[str]:
    """Yield where two records differ."""
    if isinstance(before, dict) and isinstance(after, dict):
        for name in dict.fromkeys((*before, *after)):
            yield from differences(before.get(name), after.get(name), f"{place}.{name}")
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for number, pair in enumerate(zip(before, after, strict=True)):
            yield from differences(*pair, f"{place}[{number}]")
    elif before != after:
        yield f"{place}: {str(before)[:300]!r} -> {str(after)[:300]!r}"


def compare(before: Path, after: Path) -> int:
    """Print the problems whose records differ, and return their number."""
    old, new = ([json.loads(line) for line in path.read_text().splitlines()] for path in (before, after))
    changed = 0
    for was, now in zip(old, new, strict=True):
        if found := list(differences(was, now)):
            changed += 1
            print(" ".join(now["words"]), *found[:6], sep="\n    ")
    print(f"{changed} of {len(old)} problems differ")
    return changed


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("output", type=Path, nargs="?", help="file for the records, a line of JSON each")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--only", default="", metavar="TEXT", help="only the command lines with this in them")
    parser.add_argument("--compare", type=Path, nargs=2, metavar=("BEFORE", "AFTER"))
    arguments = parser.parse_args()
    if arguments.compare:
        sys.exit(compare(*arguments.compare) > 0)
    write(arguments.output, arguments.seed, arguments.only)
