"""The named strategies behind ds_configs/ and --preset; None leaves a value to the script."""

from __future__ import annotations

from dataclasses import dataclass, replace

from zerofit.core.errors import UserError, nearest
from zerofit.core.strategy import (
    Engine,
    Lora,
    OffloadDevice,
    Precision,
    Quantization,
    Strategy,
    ZeroStage,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """One named strategy, and what a user needs to know to choose it."""

    name: str
    """Name on the command line; file names have underscores instead of hyphens."""
    title: str
    """The strategy in a few words."""
    strategy: Strategy
    gpu_bytes_per_parameter: str
    """Model states per GPU, for AdamW in 16 bit with fp32 master weights; N is the number of ranks."""
    fits: str
    """Where it fits."""
    costs: str
    """Its cost compared with the preset before."""
    not_with: str
    """Settings that it can't be combined with."""
    trains: bool = True
    """False without gradients and an optimizer."""

    @property
    def deepspeed_file(self) -> str | None:
        """Name of its DeepSpeed JSON; None under FSDP2, which has none."""
        if self.strategy.engine is not Engine.DEEPSPEED:
            return None
        return f"ds_{self.name.replace('-', '_')}.json"

    @property
    def accelerate_file(self) -> str:
        """Name of its accelerate YAML."""
        return f"accelerate_{self.name.replace('-', '_')}.yaml"


_ZERO = {stage: Strategy(engine=Engine.DEEPSPEED, zero_stage=stage) for stage in ZeroStage}
_FSDP2 = Strategy(engine=Engine.FSDP2)
_CPU, _NVME = OffloadDevice.CPU, OffloadDevice.NVME
_ON_NVME = replace(_ZERO[ZeroStage.PARAMETERS], nvme_path="/local_nvme")
# accelerate/utils/deepspeed.py, map_pytorch_optim_to_deepspeed.
_ADAM_ONLY = (
    "optimizers other than Adam and AdamW: accelerate swaps SGD, RMSprop and 8-bit ones for DeepSpeed's CPU "
    "Adam, and Adafactor, Adagrad and Lion fail"
)
_NO_OPTIMIZER = "evaluation without an optimizer"

PRESETS = (
    Preset(
        name="z1",
        title="ZeRO-1",
        strategy=_ZERO[ZeroStage.OPTIMIZER_STATES],
        gpu_bytes_per_parameter="4 + 12/N",
        fits="weights and gradients fit on each GPU, optimizer states do not",
        costs="almost nothing: data parallelism sends the same volume",
        not_with=f"Adafactor and Muon, which see flat shards; {_NO_OPTIMIZER}",
    ),
    Preset(
        name="z2",
        title="ZeRO-2",
        strategy=_ZERO[ZeroStage.GRADIENTS],
        gpu_bytes_per_parameter="2 + 14/N",
        fits="weights fit on each GPU, gradients and optimizer states do not",
        costs="with accumulation, one reduction per micro-batch instead of one per step",
        not_with="two forwards for one backward under reentrant checkpointing; as ZeRO-1",
    ),
    Preset(
        name="z2-offload",
        title="ZeRO-2, optimizer on CPU",
        strategy=replace(_ZERO[ZeroStage.GRADIENTS], optimizer_offload=_CPU),
        gpu_bytes_per_parameter="2",
        fits="weights fit on each GPU, and the node has at least 18 bytes of RAM per parameter",
        costs="the step runs on the CPU; gradients and weights cross PCIe once per step",
        not_with=f"{_ADAM_ONLY}; {_NO_OPTIMIZER}",
    ),
    Preset(
        name="z3",
        title="ZeRO-3",
        strategy=_ZERO[ZeroStage.PARAMETERS],
        gpu_bytes_per_parameter="16/N",
        fits="weights alone do not fit on one GPU, but do on all of them together",
        costs="50 % more communication: weights are gathered layer by layer",
        not_with="device_map; a model made before Accelerator() or TrainingArguments; calls on one rank only",
    ),
    Preset(
        name="z3-offload-optimizer",
        title="ZeRO-3, optimizer on CPU",
        strategy=replace(_ZERO[ZeroStage.PARAMETERS], optimizer_offload=_CPU),
        gpu_bytes_per_parameter="2/N",
        fits="weight shards fit on the GPUs, and the node has at least 18 bytes of RAM per parameter",
        costs="as ZeRO-3, and the step runs on the CPU",
        not_with=f"{_ADAM_ONLY}; as ZeRO-3",
    ),
    Preset(
        name="z3-offload",
        title="ZeRO-3, optimizer and parameters on CPU",
        strategy=replace(_ZERO[ZeroStage.PARAMETERS], optimizer_offload=_CPU, param_offload=_CPU),
        gpu_bytes_per_parameter="0",
        fits="the shards do not fit on the GPUs, and the node has at least 20 bytes of RAM per parameter",
        costs="weights cross PCIe in every forward and backward pass",
        not_with=f"{_ADAM_ONLY}; as ZeRO-3",
    ),
    Preset(
        name="z3-nvme",
        title="ZeRO-3, optimizer and parameters on NVMe",
        strategy=replace(
            _ZERO[ZeroStage.PARAMETERS], optimizer_offload=_NVME, param_offload=_NVME, nvme_path="/local_nvme"
        ),
        gpu_bytes_per_parameter="0",
        fits="RAM is too small as well; the disk must be a local NVMe, and libaio installed",
        costs="the disk's bandwidth bounds every step",
        not_with=f"resuming: optimizer states come back empty; {_ADAM_ONLY}; as ZeRO-3",
    ),
    Preset(
        name="z3-inference",
        title="ZeRO-3 for inference",
        strategy=_ZERO[ZeroStage.PARAMETERS],
        gpu_bytes_per_parameter="2/N",
        fits="evaluation or generation with a model that no single GPU holds",
        costs="weights are gathered layer by layer, for every token",
        not_with="training; generate() on some ranks only",
        trains=False,
    ),
    Preset(
        name="fsdp2",
        title="FSDP2",
        strategy=_FSDP2,
        gpu_bytes_per_parameter="16/N",
        fits="as ZeRO-3, without DeepSpeed; checkpoints resume on other numbers of GPUs",
        costs="as ZeRO-3",
        not_with="optimizers that look at whole tensors; calls on one rank only",
    ),
    Preset(
        name="fsdp2-offload",
        title="FSDP2, parameters and optimizer on CPU",
        strategy=replace(_FSDP2, optimizer_offload=_CPU, param_offload=_CPU),
        gpu_bytes_per_parameter="0",
        fits="the shards do not fit on the GPUs, and the node has at least 16 bytes of RAM per parameter",
        costs="weights and gradients cross PCIe, and the step runs on the CPU",
        not_with="8-bit and other optimizers that step on GPUs only; as FSDP2",
    ),
    Preset(
        name="fsdp2-qlora",
        title="FSDP2, LoRA on a sharded 4-bit base",
        strategy=replace(
            _FSDP2,
            lora=Lora(),
            quantization=Quantization.NF4,
            quant_storage=Precision.BF16,
            gradient_checkpointing=True,
        ),
        gpu_bytes_per_parameter="0.5/N",
        fits="adapters of a model whose 4-bit weights no single GPU holds",
        costs="4-bit weights are gathered and expanded layer by layer",
        not_with="bnb_4bit_quant_storage of uint8, which is not sharded; fp16",
    ),
)


def find_preset(name: str) -> Preset:
    """Return the preset of that name, in either spelling: command line or file name.

    Raises:
        UserError: there is no such preset.
    """
    wanted = name.lower().replace("_", "-").removesuffix(".json").removesuffix(".yaml")
    wanted = wanted.removeprefix("ds-").removeprefix("accelerate-")
    for preset in PRESETS:
        if preset.name == wanted:
            return preset
    names = [preset.name for preset in PRESETS]
    near = nearest(wanted, names)
    raise UserError(
        "unknown-preset",
        f"there is no preset {name!r}",
        found=f"--preset {name}",
        why=f"the presets are {', '.join(names)}",
        fix=f"did you mean --preset {near}?" if near else "name one of them",
    )
