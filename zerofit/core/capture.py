"""Capture: what a script was seen to train, at the moment at which its training would have begun."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any

from zerofit.core.command import Route
from zerofit.core.errors import UserError
from zerofit.core.facts import ModelFacts
from zerofit.core.secrets import MASK, is_secret_name, masked
from zerofit.core.strategy import Precision
from zerofit.core.validation import parse_strictly

CAPTURE_VERSION = 2
"""Raised whenever a capture of before can no longer be read as it was meant."""

DECODER_TOKENS = ("decoder_input_ids", "labels")
"""The decoder's own tokens in a batch, as transformers names them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedTensor:
    """One tensor of a batch."""

    name: str
    """Its key in the batch, "" for a batch that is one tensor; nested keys and places joined by dots."""
    shape: tuple[int, ...]
    dtype: str
    """As torch names it: "int64"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedBatch:
    """The inputs of one forward pass on one rank."""

    tensors: tuple[CapturedTensor, ...]
    lengths: tuple[int, ...] = ()
    """Tokens of each sample without padding; empty where the batch has no tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedLengths:
    """The distribution of the samples' lengths, in tokens."""

    num_samples: int
    """Samples whose length was looked at."""
    is_whole: bool
    """True if they are all that the script trains on."""
    p50: int
    p90: int
    p99: int
    longest: int
    counts: tuple[tuple[int, int], ...] = ()
    """(length, samples of it), the shortest first; empty in a plan and in a capture of before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedModule:
    """One module with parameters of its own or below it."""

    name: str
    """Qualified; numbers of repeated blocks stand as they are."""
    class_name: str
    num_parameters: int
    """Elements that it holds itself, in no module below it."""
    num_trainable_parameters: int
    dtype: str
    """Of its parameters: "float32"; several joined by commas."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedModel:
    """The model that the script trains."""

    class_path: str
    """Module and class: "transformers.models.gpt2.modeling_gpt2.GPT2LMHeadModel"; of an adapted model, its
    base's."""
    name: str
    """The hub id, folder or config it came from; the class's name where it came from none."""
    facts: ModelFacts
    """Dimensions as far as its configuration has them; sizes as counted."""
    is_transformers: bool
    """True if it is a PreTrainedModel, be it adapted by peft."""
    config: dict[str, Any] = field(default_factory=dict)
    """The contents of its config.json; empty where it has no configuration of transformers."""
    modules: tuple[CapturedModule, ...] = ()
    """Those that hold parameters themselves."""
    weight_dtype: str = "float32"
    """Data type of most of its weights, as the script made them."""
    adapters: tuple[str, ...] = ()
    """Kinds of peft's adapters: "LORA"."""
    is_quantized: bool = False
    loads_weights: bool = True
    """True if from_pretrained() made it, or nothing shows how it was made."""
    is_made_whole: bool = False
    """True if its class was called, so that stage 3 does not partition it while it is made."""
    can_checkpoint: bool = False
    """True if it has a switch for gradient checkpointing, as models of transformers and diffusers have."""
    checkpoints: bool = False
    """True if the script has switched gradient checkpointing on."""
    attention: str = ""
    """transformers' attn_implementation in use."""
    mixes_samples: tuple[str, ...] = ()
    """Modules that compute over the samples of a batch together, such as BatchNorm: their names."""
    passes_num_items: bool = False
    """True if its loss is divided by num_items_in_batch where it is given that number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedGroup:
    """One parameter group."""

    num_tensors: int
    num_parameters: int
    """Elements."""
    settings: dict[str, Any]
    """Its hyperparameters that are numbers, texts or lists of them; lr is the initial one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedOptimizer:
    """An optimizer that the script made."""

    class_path: str
    groups: tuple[CapturedGroup, ...]
    is_prepared: bool
    """True if it goes through Accelerator.prepare() or a Trainer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedScheduler:
    """A learning-rate scheduler that the script made."""

    class_path: str
    initial_lrs: tuple[float, ...]
    """Of each parameter group."""
    num_steps: int | None
    """Steps that it was made for, where it says."""
    is_prepared: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedLoader:
    """The DataLoader that the training loop reads."""

    batch_size: int | None
    """Samples of one batch, as the script made it; None where its batch sampler decides."""
    num_batches: int | None
    """In one epoch on one rank; None where the data has no length."""
    num_samples: int | None
    """Of the dataset."""
    collator: str
    """Name of the class or function."""
    draws_random: bool | None = None
    """True if the collator draws random numbers, once for each batch; None for one that is not known."""
    sampler: str
    """Name of the class."""
    drops_last: bool
    num_workers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Capture:
    """One script with its arguments, as it stood when its training would have begun.

    It ran as one process without a GPU.
    """

    target: tuple[str, ...]
    """The script or `-m module`, and its arguments; in a file, secret ones are masked."""
    route: Route
    """ACCELERATE: a loop of its own; TRAINER: a Trainer or a subclass."""
    stopped_at: str
    """File and line of the script at which training would have begun: "train.py:118"; empty where unknown."""
    model: CapturedModel
    optimizers: tuple[CapturedOptimizer, ...]
    schedulers: tuple[CapturedScheduler, ...]
    loader: CapturedLoader | None
    """None where no DataLoader was seen."""
    batches: tuple[CapturedBatch, ...]
    """The first few; the first one is what the first forward pass gets."""
    lengths: CapturedLengths | None
    """None where samples have no tokens."""
    micro_batch_size: int | None
    """Samples on one rank in one forward pass, as the script says; None where no tensor shows it."""
    rows_per_sample: int = 1
    """Rows of the model's batch to a sample of the DataLoader's: 2 where a collator makes a pair of each."""
    gradient_accumulation_steps: int
    """Forward passes in one optimizer step, as Accelerator or TrainingArguments have it."""
    whole_because: str = ""
    """Why the forward pass can't be run in parts, as what it was given and what it does show; empty where
    nothing does."""
    splits_batches: bool = False
    """True if the DataLoader's batch is that of all ranks together (split_batches)."""
    accumulates: bool = False
    """ACCELERATE: whether the forward pass stands inside `accelerator.accumulate()`."""
    accumulates_by_hand: int | None = None
    """ACCELERATE: forward passes that the loop itself counts up to each optimizer.step(); None where its
    source shows no such count, or not up to what."""
    mixed_precision: str = "no"
    """As Accelerator has it: "no", "fp16", "bf16" or "fp8"."""
    names_precision: bool = False
    """True if the script itself gives Accelerator its mixed_precision, be it "no", or TrainingArguments bf16
    or fp16, be it False."""
    engine: str = ""
    """The engine that the script asks for: "DeepSpeed ZeRO-2", "FSDP"; empty for plain PyTorch."""
    made_by_engine: tuple[str, ...] = ()
    """Sections of the script's DeepSpeed configuration by which only its engine trains: "scheduler", and
    "optimizer" for another than Adam and AdamW, which Trainer makes alike."""
    asks_for_cpu: bool = False
    """True if the script says that it is to run on the CPU: Accelerator(cpu=True), or use_cpu."""
    max_grad_norm: float | None = None
    """TRAINER: the norm that gradients are clipped to; None elsewhere, where the loop decides."""
    seed: int | None = None
    num_models: int = 1
    """Models that went through prepare() on one Accelerator."""
    unprepared_models: tuple[str, ...] = ()
    """Classes of the models that from_pretrained() or from_config() made after the Accelerator, beside the
    trained one, and that nothing prepares."""
    averages: str = ""
    """Class that keeps a moving average of the trained model's weights: "EMA"; empty without one."""
    uses_local_sgd: bool = False
    """ACCELERATE: whether the script trains inside accelerate's LocalSGD."""
    other_weight_bytes: int = 0
    """Parameters that the script holds beside the trained model's, such as a teacher's or an encoder's; in
    the formats that it made them."""
    trainer_class: str = ""
    """TRAINER: module and class."""
    trainer_arguments: dict[str, Any] = field(default_factory=dict)
    """TRAINER: the fields of TrainingArguments that are plain values."""
    trainer_overrides: tuple[str, ...] = ()
    """TRAINER: methods of Trainer's loop that a class outside transformers overrides: "training_step"."""
    evaluates: bool = False
    """True if the script has data to evaluate on."""
    generates: bool = False
    """True if its source calls generate(), or its Trainer predicts with it."""
    saves: bool = False
    """True if its source saves, or its Trainer does."""
    told_gpus: str = ""
    """The GPUs that the script was told of, where it asked for their number or kind; else empty."""
    notes: tuple[str, ...] = ()
    """Omissions and assumptions, one sentence each."""
    wall_time_s: float = 0.0
    """Of the capture."""
    peak_host_bytes: int = 0
    """Largest resident memory of the capturing process."""
    version: int = CAPTURE_VERSION
    """Version of this file format."""

    @property
    def precision(self) -> Precision | None:
        """The format of forward and backward that the script itself names; None where it names none."""
        if self.mixed_precision == "no" and self.names_precision:
            return Precision.FP32
        return {"fp16": Precision.FP16, "bf16": Precision.BF16}.get(self.mixed_precision)

    @property
    def optimizer(self) -> CapturedOptimizer | None:
        """The one optimizer that trains; None where there are none or several."""
        prepared = [one for one in self.optimizers if one.is_prepared]
        return prepared[0] if len(prepared) == 1 else None

    @property
    def models_left_whole(self) -> tuple[str, ...]:
        """Classes of models beside the trained one that stage 3 may not partition: nothing prepares them.

        Empty where the trained model is of such a class: one would be taken for the other.
        """
        trained = self.model.class_path.rpartition(".")[2]
        return () if trained in self.unprepared_models else self.unprepared_models

    @property
    def passes_per_step(self) -> int:
        """Forward passes on one rank in one optimizer step, those that the loop counts itself among them."""
        return self.gradient_accumulation_steps * (self.accumulates_by_hand or 1)

    def trainer_accumulates(self, data_parallel_size: int) -> bool:
        """Return True if a Trainer computes the same from other batches and more or less accumulation.

        It does where the loss of the whole window is divided by its number of items, where a batch's
        collation is known to draw no random numbers, where its loop is transformers' own, and where no epoch
        ends within an optimizer step in another way.
        """
        return (
            self.route is Route.TRAINER
            and self.model.passes_num_items
            and not self.trainer_overrides
            and self.loader is not None
            and self.loader.draws_random is False
            and self._has_even_epochs(data_parallel_size)
        )

    def _has_even_epochs(self, data_parallel_size: int) -> bool:
        size = self.global_batch_size(data_parallel_size)
        return (
            size is not None
            and self.loader is not None
            and has_even_epochs(
                global_batch_size=size,
                num_samples=self.loader.num_samples,
                max_steps=self.trainer_arguments.get("max_steps") or 0,
                drops_last=self.loader.drops_last,
                data_parallel_size=data_parallel_size,
            )
        )

    def global_batch_size(self, data_parallel_size: int) -> int | None:
        """Return the samples of one optimizer step of the script as it stands.

        Args:
            data_parallel_size: ranks that each take their own samples.
        """
        if self.micro_batch_size is None:
            return None
        ranks = 1 if self.splits_batches else data_parallel_size
        return self.micro_batch_size * self.passes_per_step * ranks


def for_plan(capture: Capture) -> Capture:
    """Return the capture as a plan holds it.

    Without secret arguments, counts of lengths, and time and memory, by which two of the same script differ.
    """
    lengths = None if capture.lengths is None else dataclasses.replace(capture.lengths, counts=())
    return dataclasses.replace(_masked(capture), lengths=lengths, wall_time_s=0.0, peak_host_bytes=0)


def has_even_epochs(
    *,
    global_batch_size: int,
    num_samples: int | None,
    max_steps: int,
    drops_last: bool,
    data_parallel_size: int,
) -> bool:
    """Return True if the samples of each optimizer step are the same however its batches are cut.

    The last step of an epoch takes what is left; on several ranks the last batches are filled up with other
    samples, and drop_last leaves out what makes no whole batch.

    Args:
        global_batch_size: samples of one optimizer step over all ranks.
        num_samples: of the dataset; None where it has no length.
        max_steps: optimizer steps of the training; 0 or less where epochs are counted.
        drops_last: whether the DataLoader leaves out what makes no whole batch.
        data_parallel_size: as in Capture.global_batch_size.
    """
    if num_samples is None or num_samples % global_batch_size == 0:
        return True
    if 0 < max_steps * global_batch_size <= num_samples:
        return True
    return data_parallel_size == 1 and not drops_last


def capture_to_json(capture: Capture) -> str:
    """Return the capture as the text of a file, its secret arguments masked."""
    return json.dumps(dataclasses.asdict(_masked(capture)), indent=1) + "\n"


def _masked(capture: Capture) -> Capture:
    arguments = {
        name: MASK if isinstance(value, str) and is_secret_name(name) else value
        for name, value in capture.trainer_arguments.items()
    }
    return dataclasses.replace(capture, target=masked(capture.target), trainer_arguments=arguments)


def capture_from_json(text: str, *, name: str) -> Capture:
    """Return the capture that a text holds; name is its file's, for the message.

    Raises:
        UserError: the text is no capture, or one of another version.
    """
    from pydantic import ValidationError

    try:
        capture = parse_strictly(Capture, text)
    except ValidationError as error:
        raise _broken(name, str(error.errors()[0]["msg"])) from None
    if capture.version != CAPTURE_VERSION:
        raise _broken(name, f"version {capture.version}")
    return capture


def _broken(name: str, found: str) -> UserError:
    return UserError(
        "capture-file-broken",
        "the record of what a script trains can't be read",
        found=f"{found}   ({name})",
        why=f"this zerofit reads records of version {CAPTURE_VERSION}",
        fix="run the command again: the script is then captured anew",
    )
