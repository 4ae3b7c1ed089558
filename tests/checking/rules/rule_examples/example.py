"""Example: the files, flags and script of a run; the small, complete, deterministic ones that rules share."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from zerofit.core.command import Route
from zerofit.core.overrides import FLAGS, flag_of
from zerofit.core.plan import GROUP_FLAGS, Topology
from zerofit.core.strategy import Engine, Lora, Strategy

if TYPE_CHECKING:
    from zerofit.checking.situation import RankCounts
    from zerofit.core.facts import Checkpoint, Machine

DEEPSPEED_FILE = "ds_config.json"
ACCELERATE_FILE = "accelerate.yaml"
SCRIPT_FILE = "train.py"
SHELL_FILE = "run.sh"
FSDP_JSON = "fsdp.json"
"""Names of an example's files."""
TWO_RANKS = Topology(world_size=2)
ON_CPU = Topology(world_size=2, on_cpu=True)
_OFFLOADS = ("optimizer_offload", "param_offload")
NVME = {"device": "nvme", "nvme_path": "/local_nvme"}
"""An offload section of DeepSpeed's file."""
WHOLE_WEIGHTS = {"stage3_param_persistence_threshold": 0, "stage3_gather_16bit_weights_on_model_save": True}
"""Settings of ZeRO-3 that partition even small weights, and gather them for saving."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """The layers of a run; None if absent."""

    deepspeed: Mapping[str, Any] | str | None = None
    """ds_config.json, as mapping or text."""
    accelerate: Mapping[str, Any] | str | None = None
    """accelerate.yaml."""
    route: Route | None = None
    """The library that reads the DeepSpeed configuration, if no script shows it."""
    command: str | None = None
    """The command line up to the script: "accelerate launch --zero_stage 3"."""
    script: str | None = None
    """The source of train.py."""
    fsdp: Mapping[str, Any] | str | None = None
    """fsdp.json, which TrainingArguments name."""
    shell: str | None = None
    """The shell script with the command, instead of `command`."""
    lacks_script: bool | None = None
    """True if the command's script does not exist."""
    hostfile: str | None = None
    """The file `hostfile`, which DeepSpeed's launcher reads."""
    arguments: str = ""
    """The script's own arguments, in shell syntax."""
    strategy: Strategy | None = None
    """zerofit's own flags, instead of files."""
    topology: Topology | None = None
    machine: Machine | None = None
    checkpoint: Checkpoint | None = None
    """The checkpoint to resume from."""
    ranks: RankCounts | None = None
    """Ranks that flags of `zerofit launch --cpu` ask for."""
    capture: Mapping[str, Any] | None = None
    """Fields in which the script's capture differs from that of an ordinary loop; those of its model and of
    its DataLoader begin with "model_" and "loader_". None if the script is not captured."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Versions other than the tested ones: {"deepspeed": "0.18.0"}."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Examples:
    """A rule's two examples, which tests check and `make evidence` runs."""

    bad: Example
    """Violates this rule and no other."""
    good: Example
    """The same example, fixed; it violates no rule."""


def strategy_flags(strategy: Strategy) -> str:
    """Return the flags of `zerofit launch` for a strategy."""
    words = []
    for name, flag in FLAGS.items():
        value = getattr(strategy, name)
        # zerofit completes one offload of FSDP2 by the other: an example that has one says both.
        is_completed = strategy.engine is Engine.FSDP2 and name in _OFFLOADS and strategy.offloads
        if name != "engine" and not is_completed and value == getattr(Strategy(), name):
            continue
        is_switch = isinstance(value, bool) or value == Lora()
        words.append(flag_of(name, value) if is_switch else f"{flag} {getattr(value, 'value', value)}")
    return " ".join(words)


def group_flags(topology: Topology) -> str:
    """Return the flags of `zerofit launch` for groups of ranks."""
    sizes = {flag: getattr(topology, name) for name, flag in GROUP_FLAGS.items()}
    return " ".join(f"{flag} {size}" for flag, size in sizes.items() if size > 1)


def rank_flags(ranks: RankCounts) -> str:
    """Return the flags of `zerofit launch` for numbers of ranks."""
    flags = {"--num-processes": ranks.world_size}
    flags |= {"--num-machines": ranks.num_nodes} if ranks.num_nodes > 1 else {}
    flags |= {f"--{kind}-parallel-size": size for kind, size in ranks.group_sizes.items() if size > 1}
    flags |= {"--pipeline-stages-per-rank": ranks.stages_per_rank} if ranks.stages_per_rank > 1 else {}
    flags |= {"--dp-replicate-size": ranks.dp_replicate_size} if ranks.dp_replicate_size > 1 else {}
    return " ".join(("--cpu", *(f"{flag} {number}" for flag, number in flags.items())))


def example_files(example: Example) -> dict[str, str]:
    """Return the text of each file of an example, by name."""
    files = {}
    if example.deepspeed is not None:
        files[DEEPSPEED_FILE] = _json(example.deepspeed)
    if example.accelerate is not None:
        files[ACCELERATE_FILE] = _yaml(example.accelerate)
    if example.script is not None:
        files[SCRIPT_FILE] = example.script
    if example.fsdp is not None:
        files[FSDP_JSON] = _json(example.fsdp)
    return files


def _json(content: Mapping[str, Any] | str) -> str:
    return content if isinstance(content, str) else json.dumps(content, indent=2) + "\n"


def _yaml(content: Mapping[str, Any] | str) -> str:
    if isinstance(content, str):
        return content
    import yaml

    return str(yaml.safe_dump(dict(content), sort_keys=False))


def config(stage: int | str, **zero: Any) -> dict[str, Any]:
    """Return a DeepSpeed configuration with only a batch size and a ZeRO section."""
    return {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": stage, **zero}}


def one_step(stage: int | str, **zero: Any) -> dict[str, Any]:
    """Return a DeepSpeed configuration for plain steps, without accumulation and clipping."""
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage, **zero},
    }


def zero(stage: int, **more: Any) -> dict[str, Any]:
    """Return a DeepSpeed configuration that partitions and gathers even these small models."""
    keys = {"stage3_param_persistence_threshold": 0, "stage3_max_live_parameters": 0}
    keys |= {"stage3_max_reuse_distance": 0, "stage3_gather_16bit_weights_on_model_save": True}
    return {**one_step(stage, **(keys if stage == 3 else {})), "train_micro_batch_size_per_gpu": 2, **more}


def native(deepspeed: Mapping[str, Any] | str) -> Example:
    """Return an example with a file that only DeepSpeed reads."""
    return Example(deepspeed=deepspeed, route=Route.NATIVE)


def at_zero(stage: int, script: str, **more: Any) -> Example:
    """Return an example of a script under DeepSpeed at a ZeRO stage."""
    return Example(deepspeed=zero(stage), script=script, **more)


def by_accelerate(deepspeed: Mapping[str, Any] | str, **more: Any) -> Example:
    """Return an example with a file that accelerate reads first."""
    return Example(deepspeed=deepspeed, route=Route.ACCELERATE, **more)


LAUNCH_FILE: dict[str, Any] = {
    "compute_environment": "LOCAL_MACHINE",
    "distributed_type": "DEEPSPEED",
    "num_machines": 1,
    "num_processes": 1,
}
"""The file of `accelerate config` for one rank, without a DeepSpeed section."""
FSDP_FILE: dict[str, Any] = {**LAUNCH_FILE, "distributed_type": "FSDP", "num_processes": 2}
"""The file of `accelerate config` for two ranks under FSDP, without its section."""
FSDP2: dict[str, Any] = {"fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
"""Its section for FSDP 2."""
ZERO2_LAUNCH = {**LAUNCH_FILE, "deepspeed_config": {"zero_stage": 2}}
NAMING_LAUNCH = {**LAUNCH_FILE, "deepspeed_config": {"deepspeed_config_file": DEEPSPEED_FILE}}
"""The same, with the example's DeepSpeed file."""
LAUNCH = "accelerate launch --config_file accelerate.yaml"


def launching(section: Mapping[str, Any] | None = None, /, **top: Any) -> Example:
    """Return an example with only a file of `accelerate config`: top-level keys, and its section."""
    return Example(accelerate={**LAUNCH_FILE, **top, "deepspeed_config": section or {"zero_stage": 2}})


def sharding(script: str, /, **more: Any) -> Example:
    """Return an example of a script under FSDP 2, by a file with more settings in its section."""
    return Example(accelerate={**FSDP_FILE, "fsdp_config": {**FSDP2, **more}}, script=script)


def without(mapping: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return a copy of a file without a key."""
    return {name: value for name, value in mapping.items() if name != key}


def changed(script: str, old: str, new: str) -> str:
    """Return a script with one piece replaced.

    Raises:
        ValueError: the piece does not occur exactly once.
    """
    if script.count(old) != 1:
        raise ValueError(f"{old!r} occurs {script.count(old)} times in the example")
    return script.replace(old, new)


def ending(script: str, lines: str) -> str:
    """Return a script with lines inserted between the training and its last lines."""
    return changed(script, "weights = accelerator", f"{lines.strip()}\nweights = accelerator")


SMALL = """\
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

accelerator = Accelerator()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
loader = DataLoader(torch.randn(32, 8), batch_size=2)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for batch in loader:
    loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
weights = accelerator.get_state_dict(model)
if accelerator.is_main_process:
    print("weights", f"{sum(weight.double().abs().sum().item() for weight in weights.values()):.6f}")
"""
"""A loop with Accelerator."""

LANGUAGE = """\
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, LlamaConfig, set_seed

accelerator = Accelerator()
set_seed(0)
config = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
)
model = AutoModelForCausalLM.from_config(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
tokens = torch.randint(0, 64, (16, 8), generator=torch.Generator().manual_seed(0))
loader = DataLoader([{"input_ids": row, "labels": row} for row in tokens], batch_size=2)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for batch in loader:
    loss = model(**batch).loss
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
weights = accelerator.get_state_dict(model)
if accelerator.is_main_process:
    print("weights", f"{sum(weight.double().abs().sum().item() for weight in weights.values()):.6f}")
"""
"""A loop with Accelerator and a language model."""

LOADED = changed(LANGUAGE, "import Accelerator\n", "import Accelerator, PartialState\n")
LOADED = changed(LOADED, "LlamaConfig, set_seed", "LlamaConfig, LlamaForCausalLM, set_seed")
LOADED = changed(LOADED, "accelerator = Accelerator()\n", "")
LOADED = changed(
    LOADED,
    "model = AutoModelForCausalLM.from_config(config)\n",
    """\
with PartialState().main_process_first():
    LlamaForCausalLM(config).save_pretrained("model")
accelerator = Accelerator()
model = AutoModelForCausalLM.from_pretrained("model")
""",
)
"""The same with a pretrained model."""

INFERENCE = """\
import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM, LlamaConfig, set_seed

accelerator = Accelerator()
set_seed(0)
config = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
)
model = accelerator.prepare(AutoModelForCausalLM.from_config(config))
prompts = torch.randint(0, 64, (3, 8), generator=torch.Generator().manual_seed(0))
model.module.generate(prompts[:2], max_new_tokens=4, do_sample=False)
"""
"""A language model that generates without training."""

EVALUATES = """\
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Trainer, TrainingArguments, set_seed

arguments = TrainingArguments(
    "out", deepspeed="ds_config.json", per_device_train_batch_size=2, per_device_eval_batch_size=2,
    max_steps=4, learning_rate=1e-2, lr_scheduler_type="constant", max_grad_norm=0.0,
    train_sampling_strategy="sequential", save_strategy="no", report_to="none",
)
set_seed(0)
config = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
)
tokens = torch.randint(0, 64, (16, 8), generator=torch.Generator().manual_seed(0))
rows = [{"input_ids": row, "labels": row} for row in tokens]
model = AutoModelForCausalLM.from_config(config)
trainer = Trainer(model, arguments, train_dataset=rows, eval_dataset=rows)
trainer.train()
trainer.evaluate()
"""
"""A Trainer that trains, and then evaluates."""


def optimizer_script(optimizer: str, *, imports: str = "torch") -> str:
    """Return a small script with Accelerator and an optimizer, for examples.

    Args:
        optimizer: the expression that creates it from `model`.
        imports: the module that it comes from, beside torch.
    """
    modules = "\n".join(f"import {name}" for name in sorted({"torch", imports}))
    return (
        f"{modules}\n"
        "from accelerate import Accelerator\n"
        "\n"
        "accelerator = Accelerator()\n"
        "torch.manual_seed(0)\n"
        "model = torch.nn.Linear(32, 32)\n"
        f"optimizer = {optimizer}\n"
        "data = torch.utils.data.DataLoader(torch.randn(32, 32), batch_size=4)\n"
        "model, optimizer, data = accelerator.prepare(model, optimizer, data)\n"
        "for batch in data:\n"
        "    accelerator.backward(model(batch).square().mean())\n"
        "    optimizer.step()\n"
        "    optimizer.zero_grad()\n"
    )
