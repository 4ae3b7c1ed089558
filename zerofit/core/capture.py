"""Capture: a script's model, optimizer, data and settings at the point where its training would begin."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any

from zerofit.core.command import Route
from zerofit.core.errors import UserError
from zerofit.core.facts import ModelFacts
from zerofit.core.optimizers.step_trace import OwnSteps
from zerofit.core.strategy import Precision
from zerofit.core.validation import parse_strictly

CAPTURE_VERSION = 3
"""Raised whenever older capture files can no longer be read correctly."""

DECODER_TOKENS = ("decoder_input_ids", "labels")
"""The batch key of the decoder's own tokens, as in transformers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedTensor:
    """One tensor of a batch."""

    name: str
    """Its key in the batch, "" if the batch is a single tensor; nested keys are joined by dots."""
    shape: tuple[int, ...]
    dtype: str
    """torch's name: "int64"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedBatch:
    """The inputs of one forward pass on one rank."""

    tensors: tuple[CapturedTensor, ...]
    lengths: tuple[int, ...] = ()
    """Tokens of each sample without padding; empty if the batch has no tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedLengths:
    """The distribution of the samples' lengths, in tokens."""

    num_samples: int
    """Number of samples measured."""
    is_whole: bool
    """True if these are all samples of the training data."""
    p50: int
    p90: int
    p99: int
    longest: int
    counts: tuple[tuple[int, int], ...] = ()
    """(length, number of samples), in ascending order of length; empty in a plan and in older captures."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedModule:
    """One module that has parameters, its own or in submodules."""

    name: str
    """Qualified name."""
    class_name: str
    num_parameters: int
    """Elements of its own parameters, without submodules."""
    num_trainable_parameters: int
    dtype: str
    """dtypes of its parameters, joined by commas: "float32"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedModel:
    """The model that the script trains."""

    class_path: str
    """Module and class, for an adapted model those of its base:
    "transformers.models.gpt2.modeling_gpt2.GPT2LMHeadModel"."""
    name: str
    """The hub id, folder or config it was made from; the class's name if from none."""
    facts: ModelFacts
    """Dimensions from its configuration, as far as given; parameter counts as measured."""
    is_transformers: bool
    """True if it is a PreTrainedModel, possibly wrapped by peft."""
    config: dict[str, Any] = field(default_factory=dict)
    """The contents of its config.json; empty if it has no transformers configuration."""
    modules: tuple[CapturedModule, ...] = ()
    """Modules with parameters of their own."""
    weight_dtype: str = "float32"
    """dtype of most of its weights, as the script created them."""
    adapters: tuple[str, ...] = ()
    """Types of its peft adapters: "LORA"."""
    is_quantized: bool = False
    loads_weights: bool = True
    """True if from_pretrained() made it, or if it is unknown how it was made."""
    is_made_whole: bool = False
    """True if its class was called directly, so that ZeRO-3 does not partition it during construction."""
    can_checkpoint: bool = False
    """True if it supports gradient checkpointing through a switch, as models of transformers and diffusers
    do."""
    checkpoints: bool = False
    """True if the script turned gradient checkpointing on."""
    attention: str = ""
    """transformers' attn_implementation."""
    mixes_samples: tuple[str, ...] = ()
    """Names of modules that compute across the samples of a batch, such as BatchNorm."""
    passes_num_items: bool = False
    """True if its loss is divided by num_items_in_batch when that argument is passed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedGroup:
    """One parameter group."""

    num_tensors: int
    num_parameters: int
    """Elements."""
    settings: dict[str, Any]
    """Its hyperparameters that are numbers, strings or lists of these; lr is the initial one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedOptimizer:
    """An optimizer that the script created."""

    class_path: str
    groups: tuple[CapturedGroup, ...]
    is_prepared: bool
    """True if it is passed to Accelerator.prepare() or a Trainer."""
    is_element_wise: bool | None = None
    """True if it steps each element by itself, as ZeRO needs; None if that could not be tried."""
    steps: OwnSteps | None = None
    """Its steps as traced; None if the table of optimizers knows them, or step() can't run without values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedScheduler:
    """A learning-rate scheduler that the script created."""

    class_path: str
    initial_lrs: tuple[float, ...]
    """One for each parameter group."""
    num_steps: int | None
    """Total number of steps it was created for, if it says so."""
    is_prepared: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedLoader:
    """The DataLoader that the training loop reads."""

    batch_size: int | None
    """Samples per batch, as the script set it; None if a batch sampler decides."""
    num_batches: int | None
    """Batches per epoch on one rank; None if the dataset has no length."""
    num_samples: int | None
    """Length of the dataset."""
    collator: str
    """Name of the class or function."""
    draws_random: bool | None = None
    """True if the collator draws random numbers, once per batch; None if unknown."""
    sampler: str
    """Name of the class."""
    drops_last: bool
    num_workers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedLoop:
    """The length of the script's own training loop, read from its source, with values of one process."""

    where: str
    """File and line of the loop: "train.py:40"."""
    num_epochs: int | None
    """Passes through the data; None if the loop has no such number."""
    max_steps: int | None
    """Optimizer steps after which it ends; None if it has no such limit."""
    max_steps_follow_data: bool = False
    """True if the source computes max_steps from the length of the data, which ranks share."""
    epochs_follow_steps: bool = False
    """True if the source computes num_epochs from max_steps."""
    micro_batches: int = 1
    """Batches of each of max_steps, where an inner loop makes them and the capture takes each for a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedEvaluation:
    """What a Trainer evaluates on, and what of it stays on the GPU."""

    batch_size: int
    """Samples per rank in one batch (per_device_eval_batch_size)."""
    num_samples: int | None
    """Of the largest dataset that it evaluates on; None if that has no length."""
    batches: tuple[CapturedBatch, ...]
    """The first few."""
    lengths: CapturedLengths | None
    """None if samples have no tokens."""
    keeps_predictions: bool = False
    """True if each batch's predictions and labels stay on the GPU for compute_metrics until they are moved
    to the host."""
    moves_every: int | None = None
    """Batches after which they are moved (eval_accumulation_steps); None moves them at the end."""
    concatenates: bool = True
    """True if each batch's are copied behind those of the batches before (eval_do_concat_batches)."""
    takes_batches: bool = False
    """True if compute_metrics takes the predictions of each batch by themselves, on the GPU, so that none are
    moved to the host (batch_eval_metrics); moves_every is then 1."""
    is_certain: bool = True
    """True if training itself evaluates (eval_strategy); else the script calls evaluate(), perhaps in other
    runs alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capture:
    """A script and its arguments, as observed where its training would begin.

    It ran as one process without a GPU.
    """

    target: tuple[str, ...]
    """The script or `-m module`, and its arguments; secrets are masked in files."""
    route: Route
    """ACCELERATE: its own training loop; TRAINER: a Trainer or a subclass."""
    stopped_at: str
    """File and line of the script where training would begin: "train.py:118"; empty if unknown."""
    model: CapturedModel
    optimizers: tuple[CapturedOptimizer, ...]
    schedulers: tuple[CapturedScheduler, ...]
    loader: CapturedLoader | None
    """None if no DataLoader was observed."""
    loop: CapturedLoop | None = None
    """ACCELERATE: None if the source does not show how long it trains."""
    steps_done: int = 0
    """TRAINER: optimizer steps of the checkpoint that it resumes from."""
    batches: tuple[CapturedBatch, ...]
    """The first few; the first is the input of the first forward pass."""
    lengths: CapturedLengths | None
    """None if samples have no tokens."""
    micro_batch_size: int | None
    """Samples per rank in one forward pass, as the script sets it; None if no tensor shows it."""
    rows_per_sample: int = 1
    """Rows of the model's batch per sample of the DataLoader: 2 if a collator makes pairs."""
    gradient_accumulation_steps: int
    """Forward passes per optimizer step, as set in Accelerator or TrainingArguments."""
    whole_because: str = ""
    """Why the forward pass can't be split into smaller micro-batches, judged by its inputs and code; empty if
    nothing forbids it."""
    splits_batches: bool = False
    """True if the DataLoader's batch is split over all ranks (split_batches)."""
    accumulates: bool = False
    """ACCELERATE: whether the forward pass is inside `accelerator.accumulate()`."""
    accumulates_by_hand: int | None = None
    """ACCELERATE: forward passes that the loop itself counts before each optimizer.step(); None if its source
    shows no such count, or not up to which number."""
    mixed_precision: str = "no"
    """As set in Accelerator: "no", "fp16", "bf16" or "fp8"."""
    names_precision: bool = False
    """True if the script itself sets mixed_precision of Accelerator (even to "no"), or bf16 or fp16 of
    TrainingArguments (even to False)."""
    engine: str = ""
    """The engine that the script configures: "DeepSpeed ZeRO-2", "FSDP"; empty for plain PyTorch."""
    made_by_engine: tuple[str, ...] = ()
    """Sections of the script's DeepSpeed configuration that only DeepSpeed can build: "scheduler", and
    "optimizer" for other types than Adam and AdamW, which Trainer builds identically."""
    asks_for_cpu: bool = False
    """True if the script asks for the CPU: Accelerator(cpu=True) or use_cpu."""
    max_grad_norm: float | None = None
    """TRAINER: the norm that gradients are clipped to; else None, as the loop decides."""
    seed: int | None = None
    num_models: int = 1
    """Models passed to prepare() of one Accelerator."""
    unprepared_models: tuple[str, ...] = ()
    """Classes of models made by from_pretrained() or from_config() after the Accelerator and not passed to
    prepare(), beside the trained one."""
    averages: str = ""
    """Class that keeps a moving average of the trained model's weights: "EMA"; empty if there is none."""
    uses_local_sgd: bool = False
    """ACCELERATE: whether the script trains inside accelerate's LocalSGD."""
    edits_gradients: str = ""
    """The first line of the source that reads or writes gradients, or makes a graph of them: "train.py:41";
    empty if none does."""
    edits_weights: str = ""
    """The first line in a training loop that goes through parameters and writes weights, or an average of
    them; empty if none does."""
    hooks_gradients: bool = False
    """True if the script has put hooks on parameters' gradients."""
    other_weight_bytes: int = 0
    """Bytes of parameters of other models in the script, such as a teacher or an encoder, in the formats it
    created them in."""
    trainer_class: str = ""
    """TRAINER: module and class."""
    trainer_arguments: dict[str, Any] = field(default_factory=dict)
    """TRAINER: the fields of TrainingArguments that have plain values."""
    trainer_overrides: tuple[str, ...] = ()
    """TRAINER: methods of Trainer's loop that the script's own class overrides: "training_step"."""
    evaluates: bool = False
    """True if the script has data to evaluate on."""
    evaluation: CapturedEvaluation | None = None
    """TRAINER: None if it does not evaluate, or its batches could not be read."""
    generates: bool = False
    """True if its source calls generate(), or its Trainer does for predictions."""
    saves: bool = False
    """True if its source saves checkpoints or models, or its Trainer does."""
    told_gpus: str = ""
    """The GPUs that were simulated for the script, if it asked for their number or kind; else empty."""
    notes: tuple[str, ...] = ()
    """Omissions and assumptions, one sentence each."""
    wall_time_s: float = 0.0
    """Duration of the capture."""
    peak_host_bytes: int = 0
    """Peak resident memory of the captured process."""
    version: int = CAPTURE_VERSION
    """Version of this file format."""

    @property
    def precision(self) -> Precision | None:
        """The precision that the script sets for forward and backward; None if it sets none."""
        if self.mixed_precision == "no" and self.names_precision:
            return Precision.FP32
        return {"fp16": Precision.FP16, "bf16": Precision.BF16}.get(self.mixed_precision)

    @property
    def optimizer(self) -> CapturedOptimizer | None:
        """The only optimizer that trains; None if there are none or several."""
        prepared = [seen for seen in self.optimizers if seen.is_prepared]
        return prepared[0] if len(prepared) == 1 else None

    @property
    def models_left_whole(self) -> tuple[str, ...]:
        """Classes of models that ZeRO-3 must not partition, as the script doesn't pass them to prepare().

        Empty if the trained model is of such a class, since they can't be told apart then.
        """
        trained = self.model.class_path.rpartition(".")[2]
        return () if trained in self.unprepared_models else self.unprepared_models

    @property
    def passes_per_step(self) -> int:
        """Forward passes per rank in one optimizer step, including those that the loop counts itself."""
        return self.gradient_accumulation_steps * (self.accumulates_by_hand or 1)

    def trainer_accumulates(self, data_parallel_size: int) -> bool:
        """Return True if a Trainer gives the same result for every split of the global batch.

        This holds if the loss is divided by the number of items in the whole accumulation window, the
        collator draws no random numbers, the training loop is transformers' own, and optimizer steps at the
        end of an epoch use the same samples.
        """
        return (
            self.route is Route.TRAINER
            and not self.hooks_gradients
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
        """Return the samples per optimizer step of the unchanged script.

        Args:
            data_parallel_size: ranks with samples of their own.
        """
        if self.micro_batch_size is None:
            return None
        ranks = 1 if self.splits_batches else data_parallel_size
        return self.micro_batch_size * self.passes_per_step * ranks


def for_plan(capture: Capture) -> Capture:
    """Return the capture as stored in a plan.

    Without secret arguments, counts of lengths, traced steps, and time and memory, which differ between
    captures of one script.
    """
    lengths = None if capture.lengths is None else dataclasses.replace(capture.lengths, counts=())
    evaluation = capture.evaluation
    if evaluation is not None and evaluation.lengths is not None:
        shown = dataclasses.replace(evaluation.lengths, counts=())
        evaluation = dataclasses.replace(evaluation, lengths=shown)
    optimizers = tuple(dataclasses.replace(seen, steps=None) for seen in capture.optimizers)
    return dataclasses.replace(
        _masked(capture),
        lengths=lengths,
        evaluation=evaluation,
        optimizers=optimizers,
        wall_time_s=0.0,
        peak_host_bytes=0,
    )


def has_even_epochs(
    *,
    global_batch_size: int,
    num_samples: int | None,
    max_steps: int,
    drops_last: bool,
    data_parallel_size: int,
) -> bool:
    """Return True if each optimizer step uses the same samples whatever the micro-batch size.

    The last step of an epoch gets the remaining samples; on several ranks the last batches are padded with
    repeated samples, and drop_last drops incomplete batches.

    Args:
        global_batch_size: samples per optimizer step over all ranks.
        num_samples: length of the dataset; None if it has none.
        max_steps: total optimizer steps; 0 or less if epochs are counted.
        drops_last: whether the DataLoader drops incomplete batches.
        data_parallel_size: as in Capture.global_batch_size.
    """
    if num_samples is None or num_samples % global_batch_size == 0:
        return True
    if 0 < max_steps * global_batch_size <= num_samples:
        return True
    return data_parallel_size == 1 and not drops_last


def capture_to_json(capture: Capture) -> str:
    """Return the capture as the text of a file, with secret arguments masked."""
    return json.dumps(dataclasses.asdict(_masked(capture)), indent=1) + "\n"


def _masked(capture: Capture) -> Capture:
    from zerofit.core.secrets import MASK, is_secret, masked  # only if needed, as its patterns take time

    arguments = {
        name: MASK if isinstance(value, str) and is_secret(name, value) else value
        for name, value in capture.trainer_arguments.items()
    }
    return dataclasses.replace(capture, target=masked(capture.target), trainer_arguments=arguments)


def capture_from_json(text: str, *, name: str) -> Capture:
    """Return the capture in a text.

    Args:
        text: the file's text.
        name: the file's name, for the message.

    Raises:
        UserError: the text is no capture, or has another version.
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
        "the capture can't be read",
        found=f"{found}   ({name})",
        why=f"this zerofit reads captures of version {CAPTURE_VERSION}",
        fix="run the command again: the script is then captured again",
    )
