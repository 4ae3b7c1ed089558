"""Rules on scripts under FSDP: what prepare() takes, what every rank must call, what has no whole weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerofit.checking.inputs.accelerate import whole_number
from zerofit.checking.inputs.fsdp_run import FsdpSource, fsdp_of, truth_of
from zerofit.checking.inputs.quantization import quantizes_to
from zerofit.checking.rule import (
    ACCELERATE,
    HANGS,
    Effect,
    Reproduction,
    Rule,
    Severity,
    declared,
    fails,
    hit_of,
    ignored,
)
from zerofit.checking.rules.fsdp.settings import under_fsdp
from zerofit.checking.rules.script.hits import OF_ENGINE, hit, hit_under_condition, unguarded_calls
from zerofit.core.command import Route
from zerofit.core.optimizers.lookup import entry_of
from zerofit.core.strategy import Engine
from zerofit.scripts.facts import Action

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zerofit.checking.inputs.fsdp_run import FsdpRun
    from zerofit.checking.rule import Hit
    from zerofit.checking.situation import Situation

_ACCELERATOR = f"{ACCELERATE}/accelerator.py"
_SHARDS = f"{ACCELERATE}/utils/fsdp_utils.py"
_RUNS = (Action.FORWARD, Action.GENERATE)
_EFFICIENT = "cpu_ram_efficient_loading"


@Rule(
    id="fsdp2-prepare-model-with-optimizer",
    severity=Severity.ERROR,
    summary="FSDP 2 needs model and optimizer in one prepare()",
    why="sharding replaces the parameters, and prepare() gives the new ones to an optimizer that it gets "
    "in the same call",
    fix="create the optimizer before prepare(), and pass both: model, optimizer = accelerator.prepare(model, "
    "optimizer)",
    see=_ACCELERATOR,
    evidence=fails("a model and optimizer must be passed together to `Accelerator.prepare()`"),
)
@under_fsdp(version=2)
def _apart(situation: Situation, fsdp: FsdpRun) -> Iterator[Hit]:
    for call in unguarded_calls(situation, Action.PREPARE):
        if call.num_models and not call.has_optimizer:
            yield hit(call.seen, " without an optimizer")


@Rule(
    id="fsdp1-optimizer-after-model",
    severity=Severity.ERROR,
    summary="with use_orig_params false FSDP 1 needs the optimizer to be created from the prepared model",
    why="prepare() replaces the parameters by flat ones, and an optimizer that was created before still has "
    "the old ones, which get no gradients: nothing is trained",
    fix="set use_orig_params: true, or call model = accelerator.prepare(model) and create the optimizer then",
    see="https://github.com/huggingface/accelerate/issues/3256",
    evidence=Reproduction(outcome=Effect.DIFFERS, not_reproduced="needs a GPU: FSDP 1 takes no CPU ranks"),
)
@under_fsdp(FsdpSource.LAUNCH, FsdpSource.PLUGIN, version=1)
def _old_parameters(situation: Situation, fsdp: FsdpRun) -> Iterator[Hit]:
    said = fsdp.find("use_orig_params")
    if said is None or truth_of(said.value) is not False:
        return
    for call in unguarded_calls(situation, Action.PREPARE):
        if call.num_models and call.has_optimizer:
            yield hit(call.seen, f" with {said.text}")


@Rule(
    id="fsdp2-one-model",
    severity=Severity.ERROR,
    summary="FSDP 2 takes one model in a prepare()",
    why="accelerate maps old parameters to new ones for a single model, and refuses more",
    fix="prepare one model with its optimizer; keep the others whole, or make them modules of one model",
    see=_ACCELERATOR,
    evidence=fails("Only one model is supported when using FSDP2"),
)
@under_fsdp(version=2)
def _several(situation: Situation, fsdp: FsdpRun) -> Iterator[Hit]:
    for call in unguarded_calls(situation, Action.PREPARE):
        if call.num_models > 1:
            yield hit(call.seen)


@Rule(
    id="fsdp2-optimizer-takes-no-dtensors",
    severity=Severity.ERROR,
    summary="this optimizer can't step the DTensors of FSDP 2",
    why="its kernels or in-place operations have no rule for sharded tensors, so that the first step fails",
    fix="use torch's AdamW, which can be fused, or DeepSpeed",
    see="https://docs.pytorch.org/docs/stable/distributed.tensor.html",
    evidence=fails(
        "bitsandbytes.optimizer_update_32bit.default does not have a sharding strategy registered"
    ),
)
def _optimizer(situation: Situation) -> Iterator[Hit]:
    fsdp, strategy = fsdp_of(situation), situation.strategy
    is_planned = strategy is not None and strategy.engine is Engine.FSDP2
    if not is_planned and (fsdp is None or fsdp.version != 2):
        return
    said = situation.settings.optimizer
    entry = entry_of(said.value) if said is not None and said.value is not None else None
    if said is not None and entry is not None and not entry.takes_dtensors:
        yield hit_of(said, " with FSDP 2")


@Rule(
    id="fsdp-weights-need-all-ranks",
    severity=Severity.ERROR,
    summary="under FSDP a single rank can't run a model or collect its weights",
    why="every rank has a part of each weight, and a rank that needs it waits until all have sent theirs",
    fix="move it out of the condition, so that every rank runs it",
    see="https://huggingface.co/docs/accelerate/usage_guides/fsdp#state-dict",
    evidence=HANGS,
)
@under_fsdp()
def _on_one_rank(situation: Situation, fsdp: FsdpRun) -> Iterator[Hit]:
    script = situation.script
    saves = (Action.SAVE_MODEL,) if script is not None and script.route is Route.ACCELERATE else ()
    for call in unguarded_calls(situation, *_RUNS, Action.GET_STATE_DICT, *saves):
        if call.one_rank is not None and call.state in OF_ENGINE:
            yield hit_under_condition(call)


@Rule(
    id="fsdp-checkpoint-needs-all-ranks",
    severity=Severity.ERROR,
    summary="a checkpoint of FSDP must be saved by every rank",
    why="each rank writes its shards, or sends them to the main rank, and waits for the others",
    fix="move it out of the condition",
    see="https://huggingface.co/docs/accelerate/usage_guides/fsdp#saving-and-loading",
    evidence=HANGS,
)
@under_fsdp()
def _checkpoint_on_one_rank(situation: Situation, fsdp: FsdpRun) -> Iterator[Hit]:
    for call in unguarded_calls(situation, Action.SAVE_STATE):
        if call.one_rank is not None:
            yield hit_under_condition(call)


@Rule(
    id="fsdp2-save-needs-whole-weights",
    severity=Severity.ERROR,
    summary="under FSDP 2 a model itself has no whole weights to save",
    why="its state_dict() has DTensors, each with this rank's shard: save_pretrained() can't write them, and "
    "what torch.save() writes no plain model loads",
    fix="save accelerator.get_state_dict(model), which every rank calls; save_pretrained() takes it",
    see="https://huggingface.co/docs/accelerate/usage_guides/fsdp#state-dict",
    evidence=fails("Attempted to access the data pointer on an invalid python storage"),
)
@under_fsdp(version=2)
def _saves_shards(situation: Situation, fsdp: FsdpRun) -> Iterator[Hit]:
    behind = {Action.SAVE_PRETRAINED: " without state_dict=", Action.STATE_DICT: " of a sharded model"}
    for call in unguarded_calls(situation, Action.SAVE_PRETRAINED, Action.STATE_DICT):
        if call.state in OF_ENGINE and not call.given & {"state_dict", "**"}:
            yield hit(call.seen, behind[call.action])


@Rule(
    id="fsdp2-weights-loaded-before-prepare",
    severity=Severity.ERROR,
    summary="FSDP 2 loads no whole weights into a sharded model",
    why="load_state_dict() compares plain tensors with DTensors, and fails for each weight",
    fix="load them before prepare(), or call accelerator.load_state() for a checkpoint of this run",
    see="https://docs.pytorch.org/docs/stable/distributed.checkpoint.html",
    evidence=fails("got mixed torch.Tensor and DTensor"),
)
@under_fsdp(version=2)
def _loads_late(situation: Situation, fsdp: FsdpRun) -> Iterator[Hit]:
    for call in unguarded_calls(situation, Action.LOAD_STATE_DICT):
        if call.state in OF_ENGINE:
            yield hit(call.seen, " after prepare()")


@Rule(
    id="fsdp2-resize-before-prepare",
    severity=Severity.ERROR,
    summary="under FSDP 2 embeddings can only be resized before prepare()",
    why="the embeddings are DTensors then, which resizing mixes with plain tensors",
    fix="call resize_token_embeddings() before prepare()",
    see=_SHARDS,
    evidence=fails("got mixed torch.Tensor and DTensor"),
)
@under_fsdp(version=2)
def _resizes_late(situation: Situation, fsdp: FsdpRun) -> Iterator[Hit]:
    for call in unguarded_calls(situation, Action.RESIZE):
        if call.state in OF_ENGINE:
            yield hit(call.seen, " after prepare()")


@Rule(
    id="fsdp-generate-in-step",
    severity=Severity.ERROR,
    summary="under FSDP ranks must generate in step",
    why="a rank that finishes early stops sending its part of the weights to the others",
    fix="leave synced_gpus out, or set it to True",
    see="https://huggingface.co/docs/transformers/main_classes/text_generation",
    evidence=HANGS,
)
@under_fsdp()
def _generates_out_of_step(situation: Situation, fsdp: FsdpRun) -> Iterator[Hit]:
    for call in unguarded_calls(situation, Action.GENERATE):
        synced = call.keyword("synced_gpus")
        if synced is not None and synced.value is False and call.state in OF_ENGINE and not call.one_rank:
            yield hit(call.seen)


@Rule(
    id="fsdp-clips-by-norm",
    severity=Severity.ERROR,
    summary="accelerate does not clip values under FSDP",
    why="clip_grad_value_() of the Accelerator refuses FSDP and DeepSpeed",
    fix="use accelerator.clip_grad_norm_()",
    see=_ACCELERATOR,
    evidence=fails("do not support `clip_grad_value_`"),
)
@under_fsdp()
def _clips_values(situation: Situation, fsdp: FsdpRun) -> Iterator[Hit]:
    for call in unguarded_calls(situation, Action.CLIP_VALUE):
        yield hit(call.seen, " with FSDP")


@Rule(
    id="fsdp-checkpoints-blocks-twice",
    severity=Severity.WARNING,
    summary="the script and FSDP both checkpoint activations",
    why="each block is recomputed inside of a block that is recomputed, which costs a second forward pass",
    fix="leave gradient_checkpointing_enable() out, or activation_checkpointing of FSDP",
    see=_SHARDS,
    evidence=Reproduction(outcome=Effect.COSTS, observed=(("checkpointed_blocks", 2),)),
)
@under_fsdp()
def _blocks_twice(situation: Situation, fsdp: FsdpRun) -> Iterator[Hit]:
    said = fsdp.find("activation_checkpointing")
    if said is not None and truth_of(said.value) is True and situation.route is not Route.TRAINER:
        for call in unguarded_calls(situation, Action.CHECKPOINT_ACTIVATIONS):
            yield hit(call.seen, f" with {said.text}")


@Rule(
    id="fsdp2-shards-no-8-bit-weights",
    severity=Severity.ERROR,
    summary="FSDP 2 does not shard 8-bit weights",
    why="it replaces each parameter, and bitsandbytes' Int8Params can't become sharded ones",
    fix="load the model in 4 bits with bnb_4bit_quant_storage=torch.bfloat16, or leave FSDP out",
    see="https://huggingface.co/docs/bitsandbytes/fsdp_qlora",
    evidence=fails("Creating a Parameter from an instance of type Int8Params"),
)
@under_fsdp(version=2)
def _eight_bits(situation: Situation, fsdp: FsdpRun) -> Iterator[Hit]:
    said = quantizes_to(situation, 8)
    if said is not None:
        yield hit_of(said, f" with {fsdp.uses.text}")


@Rule(
    id="fsdp2-loads-quantized-whole",
    severity=Severity.WARNING,
    summary="under FSDP 2 cpu_ram_efficient_loading has no effect on 4-bit weights",
    why="transformers loads quantized weights on every rank, and accelerate does not send 4-bit ones from "
    "rank 0, so that the host needs memory for a copy of each rank",
    fix="leave cpu_ram_efficient_loading out",
    see=_SHARDS,
    evidence=ignored(not_reproduced="the harness does not observe how a rank loads weights"),
)
def _loads_whole(situation: Situation) -> Iterator[Hit]:
    said = quantizes_to(situation, 4)
    fsdp, axolotl = fsdp_of(situation), situation.arguments.axolotl_fsdp or {}
    version = axolotl.get("version")
    loading = axolotl.get(_EFFICIENT) if version is not None and whole_number(version.value) == 2 else None
    if fsdp is not None and fsdp.version == 2:
        loading = fsdp.find(_EFFICIENT)
    if said is not None and loading is not None and truth_of(loading.value) is True:
        yield hit_of(loading, f" with {said.text}")


@Rule(
    id="fsdp2-quantized-storage-is-float",
    severity=Severity.WARNING,
    summary="4-bit weights in uint8 are not sharded",
    why="FSDP shards floating tensors alone, so that every rank keeps all 4-bit weights",
    fix="add bnb_4bit_quant_storage=torch.bfloat16 to BitsAndBytesConfig, the format of the other weights",
    see="https://huggingface.co/docs/bitsandbytes/fsdp_qlora#quantized-data-storage",
    evidence=ignored(("whole_types", ["uint8"])),
)
@under_fsdp()
def _whole_quantized(situation: Situation, fsdp: FsdpRun) -> Iterator[Hit]:
    for call in unguarded_calls(situation, Action.QUANTIZE):
        bits, storage = call.keyword("load_in_4bit"), call.keyword("bnb_4bit_quant_storage")
        is_open = "bnb_4bit_quant_storage" in call.given and storage is None
        is_integer = storage is None or str(storage.value).rpartition(".")[2] in ("uint8", "int8", "None")
        if bits is not None and bits.value is True and is_integer and not is_open:
            yield hit(call.seen, "" if storage else " without bnb_4bit_quant_storage")


RULES = declared(vars())
