"""Rules on optimizers under ZeRO and offload, and on DeepSpeed's optimizer section."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from zerofit.checking.rule import (
    ACCELERATE,
    DEEPSPEED,
    DEEPSPEED_DOCS,
    DIFFERS,
    Effect,
    Hit,
    Reproduction,
    Rule,
    Severity,
    declared,
    fails,
    hit_at,
)
from zerofit.checking.rules.optimizer.table import (
    CONFIG_WITH_MUP,
    EIGHT_BIT,
    OF_CONFIG,
    REMOVED,
    Cause,
    OptimizerAnswer,
    verdict,
)
from zerofit.checking.rules.script.hits import prepared_beside_section
from zerofit.checking.situation import known, stage_of
from zerofit.configs.document import SetValue, say
from zerofit.core.command import Route
from zerofit.core.errors import nearest
from zerofit.core.optimizers.lookup import entry_of, optimizer_of_deepspeed
from zerofit.core.setting import Confidence
from zerofit.core.strategy import Engine, OffloadDevice
from zerofit.core.supported import release_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from zerofit.checking.rules.optimizer.table import OptimizerRow
    from zerofit.checking.situation import Situation
    from zerofit.core.optimizers.entry import OptimizerEntry
    from zerofit.core.setting import Said
    from zerofit.core.strategy import ZeroStage


UNTESTED_KEY = "zero_allow_untested_optimizer"
FORCE_KEY = "zero_force_ds_cpu_optimizer"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedOptimizer:
    """A run's optimizer, its placement, and the table's row for them."""

    row: OptimizerRow
    optimizer: Said[str | None]
    zero_stage: Said[ZeroStage]
    optimizer_offload: Said[OffloadDevice]
    forces_cpu_optimizer: bool

    @property
    def offloads(self) -> bool:
        """True if the optimizer's states are offloaded."""
        return self.optimizer_offload.value is not OffloadDevice.NONE

    @property
    def texts(self) -> str:
        """The optimizer and its placement, in the user's spelling."""
        other = self.optimizer_offload if self.offloads else self.zero_stage
        return f"{self.optimizer.text} with {other.text}"


def placed_optimizer(situation: Situation) -> PlacedOptimizer | None:
    """Return the run's optimizer with its row of the table; None without DeepSpeed's optimizer step.

    Raises:
        UnknownFact: the optimizer, its placement or the route is unknown, and matters.
    """
    settings = situation.settings
    if settings.engine is not None and settings.engine.value is not Engine.DEEPSPEED:
        return None
    stage = stage_of(situation)
    offload = known(settings.optimizer_offload, "the optimizer offload")
    optimizer = known(settings.optimizer, "the optimizer, which the script creates")
    if optimizer.value is None:
        return None
    forces = known(settings.force_cpu_optimizer, FORCE_KEY).value
    rows = {
        verdict(
            optimizer.value,
            zero_stage=stage.value,
            optimizer_offload=offload.value,
            forces_cpu_optimizer=forces,
            route=route,
            allows_untested=situation.file.value(UNTESTED_KEY) is True,
        )
        for route in _routes(situation)
    }
    row = rows.pop() if len(rows) == 1 else known(None, "which library passes the optimizer to DeepSpeed")
    return PlacedOptimizer(
        row=row, optimizer=optimizer, zero_stage=stage, optimizer_offload=offload, forces_cpu_optimizer=forces
    )


def _routes(situation: Situation) -> tuple[Route, ...]:
    if situation.route is not None:
        return (situation.route,)
    if situation.is_from_flags:
        return (Route.ACCELERATE,)  # an optimizer set by a strategy goes through prepare()
    return tuple(Route)


def because_of(*causes: Cause, on_gpus: bool = False) -> Callable[[Situation], Iterator[Hit]]:
    """Return a predicate that finds the combinations with one of these causes in the table.

    Args:
        causes: the table's.
        on_gpus: exclude ranks on the CPU, where all memory is host memory.
    """

    def find(situation: Situation) -> Iterator[Hit]:
        if on_gpus and situation.topology is not None and situation.topology.on_cpu:
            return
        placed = placed_optimizer(situation)
        if placed is not None and placed.row.cause in causes:
            yield hit(placed)

    return find


def hit(placed: PlacedOptimizer, *, fix: str | None = None) -> Hit:
    """Return the finding for an optimizer and its placement."""
    return Hit(
        found=placed.texts,
        place=placed.optimizer.place or placed.optimizer_offload.place,
        fix=fix,
        confidence=placed.optimizer.confidence,
    )


_MAP = f"{ACCELERATE}/utils/deepspeed.py"
_ENGINE = f"{DEEPSPEED}/runtime/engine.py"
_BNB = "https://github.com/bitsandbytes-foundation/bitsandbytes/blob/0.50.2/bitsandbytes/backends/cpu/ops.py"


_ZERO_UTILS = f"{DEEPSPEED}/runtime/zero/stage_1_and_2.py"
_REDUCE_SCATTER = ("zero_optimization", "reduce_scatter")
_TYPE = ("optimizer", "type")


@Rule(
    id="offload-needs-adam",
    severity=Severity.ERROR,
    summary="with offload another optimizer trains than the script's",
    why="accelerate silently replaces it by DeepSpeed's CPU Adam",
    fix="use AdamW, or leave out {optimizer_offload}",
    see=_MAP,
    evidence=Reproduction(outcome=Effect.DIFFERS, observed=(("optimizer", "DeepSpeedCPUAdam"),)),
)
def _swapped(situation: Situation) -> Iterator[Hit]:
    placed = placed_optimizer(situation)
    if placed is None or not _is_another(situation, placed):
        return
    fix = None
    if situation.deepspeed is not None:
        fix = f"use torch.optim.AdamW, leave out offload_optimizer, or write {FORCE_KEY}: false"
    yield hit(placed, fix=fix)


def _is_another(situation: Situation, placed: PlacedOptimizer) -> bool:
    """Return True if the replacement is not what was asked for: a variant of Adam may be, in a file."""
    causes = (Cause.SWAPPED, Cause.SWAPPED_ADAM) if situation.is_from_flags else (Cause.SWAPPED,)
    return placed.row.cause in causes


def _swapped_adam(situation: Situation) -> tuple[PlacedOptimizer, Said[Any] | None] | None:
    """Return a variant of Adam that accelerate replaces, and Trainer's weight decay; None if unknown."""
    placed = placed_optimizer(situation)
    if placed is None or placed.row.cause is not Cause.SWAPPED_ADAM or situation.is_from_flags:
        return None
    return placed, situation.arguments.find_or_default("weight_decay")


@Rule(
    id="offload-changes-weight-decay",
    severity=Severity.WARNING,
    summary="with offload weight decay is Adam's, not AdamW's",
    why="accelerate replaces the optimizer by DeepSpeed's CPU Adam, and keeps AdamW's decay only for torch's",
    fix="use torch.optim.AdamW, or leave out {optimizer_offload}",
    see=_MAP,
    evidence=DIFFERS,
)
def _decays_otherwise(situation: Situation) -> Iterator[Hit]:
    found = _swapped_adam(situation)
    if found is None or (found[1] is not None and found[1].value in (0, None)):
        return
    fix = None
    if situation.deepspeed is not None:
        of_trainer = situation.route is Route.TRAINER
        adamw = "optim=adamw_torch" if of_trainer else "torch.optim.AdamW"
        fix = f"use {adamw}, which costs no GPU memory with offload, or leave out offload_optimizer"
    yield hit(found[0], fix=fix)


@Rule(
    id="offload-ignores-eight-bits",
    severity=Severity.ADVICE,
    summary="with offload the states of an 8-bit optimizer take 32 bits",
    why="accelerate replaces it by DeepSpeed's CPU Adam, which keeps fp32 states in host memory",
    fix="plan 8 bytes of host memory a parameter for them, or leave out {optimizer_offload}",
    see=_MAP,
    evidence=Reproduction(outcome=Effect.COSTS, observed=(("optimizer", "DeepSpeedCPUAdam"),)),
)
def _keeps_wide_states(situation: Situation) -> Iterator[Hit]:
    found = _swapped_adam(situation)
    if found is not None and found[1] is not None and found[1].value == 0 and _is_8_bit(found[0]):
        yield hit(found[0])


def _is_8_bit(placed: PlacedOptimizer) -> bool:
    return placed.optimizer.value in EIGHT_BIT


_OFFLOAD_SWAP_FAILS_IN_STEP = Rule(
    id="offload-swap-fails-in-step",
    severity=Severity.ERROR,
    summary="this optimizer fails in its first step with offload",
    why="accelerate passes its parameter groups to DeepSpeed's CPU Adam, which can't use their values",
    fix="use AdamW, or leave out {optimizer_offload}",
    see=_MAP,
    find=because_of(Cause.SWAP_KEEPS_GROUPS),
    evidence=fails("adam_update(): incompatible function arguments"),
)


_OFFLOAD_SWAP_FAILS_IN_PREPARE = Rule(
    id="offload-swap-fails-in-prepare",
    severity=Severity.ERROR,
    summary="this optimizer fails in prepare() with offload",
    why="accelerate passes adamw_mode to DeepSpeed's CPU Adagrad or Lion, which only Adam accepts",
    fix=f"write {FORCE_KEY}: false, or name the optimizer in DeepSpeed's own optimizer section",
    see=_MAP,
    find=because_of(Cause.SWAP_ARGUMENT),
    evidence=fails("got an unexpected keyword argument 'adamw_mode'"),
)


_NATIVE_OFFLOAD_NEEDS_CPU_ADAM = Rule(
    id="native-offload-needs-cpu-adam",
    severity=Severity.ERROR,
    summary="deepspeed.initialize() refuses the script's optimizer with offload",
    why="only accelerate replaces it, and DeepSpeed only accepts its own CPU Adam and CPU Lion",
    fix=f"use deepspeed.ops.adam.DeepSpeedCPUAdam, or write {FORCE_KEY}: false",
    see=_ENGINE,
    find=because_of(Cause.REFUSED_CLIENT),
    evidence=fails("ZeRO-Offload with a client provided optimizer"),
)


@Rule(
    id="eight-bit-optimizer-on-cpu",
    severity=Severity.ADVICE,
    summary="an 8-bit optimizer is slow on the CPU, and needs more memory in its step than it saves",
    why="bitsandbytes has no 8-bit kernels there: it converts each tensor's states to fp32 and back",
    fix="leave out {optimizer_offload}, or use AdamW, which becomes DeepSpeed's CPU Adam",
    see=_BNB,
    evidence=Reproduction(outcome=Effect.COSTS, observed=(("optimizer", "AdamW8bit"),)),
)
def _eight_bit_on_cpu(situation: Situation) -> Iterator[Hit]:
    placed = placed_optimizer(situation)
    if placed is None or not placed.offloads or placed.forces_cpu_optimizer:
        return
    if placed.optimizer.value in EIGHT_BIT and placed.row.answer is not OptimizerAnswer.REFUSED:
        yield hit(placed)


_CPU_OPTIMIZER_NEEDS_OFFLOAD = Rule(
    id="cpu-optimizer-needs-offload",
    severity=Severity.ERROR,
    summary="DeepSpeed's CPU optimizers need optimizer offload",
    why="without it the parameters that they update are on the GPU",
    fix="use torch.optim.AdamW, which accelerate replaces by the CPU optimizer with offload",
    see=f"{DEEPSPEED}/ops/adam/cpu_adam.py",
    find=because_of(Cause.ON_GPU, on_gpus=True),
    evidence=fails(not_reproduced="needs a GPU"),
)


_GPU_OPTIMIZER_ON_CPU = Rule(
    id="gpu-optimizer-on-cpu",
    severity=Severity.ERROR,
    summary="DeepSpeed's fused optimizers can't step offloaded states",
    why="they are GPU kernels, and offload keeps the parameters that they update on the CPU",
    fix="use torch.optim.AdamW, or leave out {optimizer_offload}",
    see=f"{DEEPSPEED}/ops/adam/fused_adam.py",
    find=because_of(Cause.ON_CPU, on_gpus=True),
    evidence=fails(not_reproduced="needs a GPU"),
)


_ZERO_FLATTENS_TENSORS = Rule(
    id="zero-flattens-tensors",
    severity=Severity.WARNING,
    summary="this optimizer gives different results under ZeRO",
    why="it needs whole tensors, or a second set of weights, and ZeRO passes it flat shards of one set",
    fix="use AdamW, or its 8-bit form to save memory, or set {zero_stage} to 0",
    see=_ZERO_UTILS,
    find=because_of(Cause.WHOLE_TENSORS, Cause.TWO_WEIGHTS),
    evidence=DIFFERS,
)


_MUON_NEEDS_MATRICES = Rule(
    id="muon-needs-matrices",
    severity=Severity.ERROR,
    summary="this optimizer fails under ZeRO",
    why="it only supports matrices, and ZeRO passes every optimizer flat shards",
    fix="set {zero_stage} to 0, or use AdamW; Muon can be named in DeepSpeed's own optimizer section",
    see="https://github.com/pytorch/pytorch/blob/v2.13.0/torch/optim/_muon.py",
    find=because_of(Cause.NEEDS_MATRICES),
    evidence=fails("Param gradient must be a 2D matrix"),
)


_ZERO_REBUILDS_ADAGRAD = Rule(
    id="zero-rebuilds-adagrad",
    severity=Severity.WARNING,
    summary="under ZeRO Adagrad loses its parameter groups and its learning rate schedule",
    why="DeepSpeed creates a new one from its defaults, and schedulers keep the old one",
    fix="use AdamW, or set {zero_stage} to 0",
    see=_ZERO_UTILS,
    find=because_of(Cause.REBUILT),
    evidence=DIFFERS,
)


_ENGINE_PASSES_NO_CLOSURE = Rule(
    id="engine-passes-no-closure",
    severity=Severity.ERROR,
    summary="L-BFGS can't train under DeepSpeed",
    why="its step() evaluates the model through a closure, which DeepSpeed's engine does not pass on",
    fix="use AdamW",
    see=_ENGINE,
    find=because_of(Cause.NEEDS_CLOSURE),
    evidence=fails("missing 1 required positional argument: 'closure'"),
)


@Rule(
    id="unknown-optimizer-type",
    severity=Severity.ERROR,
    summary="DeepSpeed has no optimizer of this name",
    why="optimizer.type must be one of DeepSpeed's own, or the exact name of a class in torch.optim",
    fix="use AdamW",
    see=f"{DEEPSPEED_DOCS}#optimizer-parameters",
    evidence=fails("AdamP is not a supported DeepSpeed Optimizer"),
)
def _unknown_type(situation: Situation) -> Iterator[Hit]:
    kind = situation.file.value(*_TYPE)
    known_types = (*OF_CONFIG, *CONFIG_WITH_MUP, *REMOVED)
    if isinstance(kind, str) and optimizer_of_deepspeed(kind) not in known_types:
        near = nearest(kind, [name.removeprefix("config.") for name in OF_CONFIG])
        yield hit_at(situation.file, _TYPE, fix=f"did you mean {near}?" if near else "use AdamW")


@Rule(
    id="optimizer-type-removed",
    severity=Severity.ERROR,
    summary="DeepSpeed no longer has this optimizer",
    why="it removed the optimizers that compress gradients to one bit",
    fix="use AdamW, or install an earlier release",
    see="https://github.com/deepspeedai/DeepSpeed/issues/8489",
    evidence=fails("OneBitAdam is not a supported DeepSpeed Optimizer"),
)
def _removed_type(situation: Situation) -> Iterator[Hit]:
    entry = _removed_entry(situation)
    if entry is None or _installed_before(situation, entry.until):
        return
    fix = f"use AdamW, or install deepspeed<{entry.until}"
    if situation.settings.zero_stage is not None and situation.settings.zero_stage.value:
        fix = f"use AdamW: deepspeed<{entry.until} has it, and refuses it with ZeRO"
    # The file may be for an environment with the release that it was written for.
    yield hit_at(situation.file, _TYPE, fix=fix, confidence=Confidence.LIKELY)


@Rule(
    id="onebit-optimizer-without-zero",
    severity=Severity.ERROR,
    summary="DeepSpeed's 1-bit optimizers and ZeRO exclude each other",
    why="they compress whole gradients, which ZeRO partitions",
    fix="set zero_optimization.stage to 0, or use AdamW",
    see="https://www.deepspeed.ai/tutorials/onebit-adam/",
    evidence=fails(not_reproduced="needs deepspeed<0.19.7"),
)
def _onebit_with_zero(situation: Situation) -> Iterator[Hit]:
    entry = _removed_entry(situation)
    if entry is not None and _installed_before(situation, entry.until):
        stage = stage_of(situation)
        if stage.value:
            yield hit_at(situation.file, _TYPE, stage.text)


def _removed_entry(situation: Situation) -> OptimizerEntry | None:
    kind = situation.file.value(*_TYPE)
    entry = entry_of(optimizer_of_deepspeed(kind)) if isinstance(kind, str) else None
    return entry if entry is not None and entry.until else None


def _installed_before(situation: Situation, release: str) -> bool:
    """Return True if the installed DeepSpeed is older than a release."""
    version = situation.versions.deepspeed if situation.versions else None
    return version is not None and release_of(version) < release_of(release)


@Rule(
    id="untested-optimizer-needs-flag",
    severity=Severity.ERROR,
    summary="DeepSpeed refuses this untested optimizer with ZeRO by default",
    why="it has tested few with ZeRO, and accelerate only allows untested optimizers of the script",
    fix=f"write {UNTESTED_KEY}: true",
    see=_ENGINE,
    evidence=fails("You are using an untested ZeRO Optimizer"),
)
def _untested(situation: Situation) -> Iterator[Hit]:
    placed = placed_optimizer(situation)
    if placed is None or placed.row.cause is not Cause.UNTESTED or placed.optimizer.value is None:
        return
    allowed = verdict(
        placed.optimizer.value,
        zero_stage=placed.zero_stage.value,
        optimizer_offload=placed.optimizer_offload.value,
        forces_cpu_optimizer=placed.forces_cpu_optimizer,
        route=situation.route or Route.NATIVE,
        allows_untested=True,
    )
    fix = None if allowed.answer in (OptimizerAnswer.ALLOWED, OptimizerAnswer.UNKNOWN) else "use AdamW"
    edit = SetValue(document=situation.file.name, path=(UNTESTED_KEY,), value=True)
    trains = allowed.answer is OptimizerAnswer.ALLOWED and not allowed.not_run
    yield replace(hit(placed, fix=fix), edits=(edit,) if situation.deepspeed and trains else ())


@Rule(
    id="adam-section-decays-as-adamw",
    severity=Severity.WARNING,
    summary="DeepSpeed's Adam applies AdamW's weight decay",
    why="adam_w_mode is true by default, whatever the type",
    fix="set optimizer.type to AdamW, or optimizer.params.adam_w_mode to false",
    see=f"{DEEPSPEED_DOCS}#optimizer-parameters",
    evidence=DIFFERS,
)
def _adam_decoupled(situation: Situation) -> Iterator[Hit]:
    file, path = situation.file, ("optimizer", "params", "weight_decay")
    decay = file.value(*path)
    if str(file.value(*_TYPE)).lower() != "adam" or file.at("optimizer", "params", "adam_w_mode"):
        return
    used = situation.settings.optimizer
    if isinstance(decay, (int, float)) and decay > 0 and used is not None and used.value == "config.Adam":
        yield hit_at(file, _TYPE, say(file, *path))


@Rule(
    id="muon-needs-whole-gradients",
    severity=Severity.ERROR,
    summary="at ZeRO-3 DeepSpeed's Muon needs reduce_scatter: false",
    why="it orthogonalises whole gradients, and reduce-scatter splits them before its step",
    fix="write reduce_scatter: false in zero_optimization",
    see=f"{DEEPSPEED}/runtime/zero/stage3.py",
    evidence=fails("Muon and reduce scatter cannot be used together"),
)
def _muon_scatters(situation: Situation) -> Iterator[Hit]:
    file = situation.file
    scatters = situation.deepspeed is not None and file.value(*_REDUCE_SCATTER) is not False
    placed = placed_optimizer(situation) if scatters else None
    if placed is not None and placed.row.cause is Cause.REDUCE_SCATTER:
        edit = SetValue(document=file.name, path=_REDUCE_SCATTER, value=False)
        yield Hit(found=placed.texts, place=placed.optimizer.place, edits=(edit,))


@Rule(
    id="two-optimizers",
    severity=Severity.ERROR,
    summary="the script and the DeepSpeed file both define an optimizer",
    why="prepare() accepts only one of them",
    fix="use accelerate.utils.DummyOptim in the script, or remove the optimizer section",
    see=f"{ACCELERATE}/accelerator.py",
    evidence=fails("You cannot specify an optimizer in the config file and in the code"),
)
def _section_and_script(situation: Situation) -> Iterator[Hit]:
    file, script = situation.file, situation.script
    if script is None or situation.route is not Route.ACCELERATE or file.at("optimizer") is None:
        return
    section = say(file, *_TYPE) if isinstance(file.value(*_TYPE), str) else say(file, "optimizer")
    own = [used for used in script.optimizers if used.id != "accelerate.DummyOptim"]
    prepared = prepared_beside_section(script, is_scheduler=False)
    certain = [made.place for made, confidence in prepared if confidence is Confidence.CERTAIN]
    for used in own:
        # A script that also makes the placeholder chooses between them.
        if used.place in certain or len(own) == len(script.optimizers):
            confidence = Confidence.CERTAIN if used.place in certain else Confidence.LIKELY
            found = f"{used.text} with {section} in {file.name}"
            yield hit_at(file, _TYPE, found=found, confidence=confidence)


_DUMMY_OPTIMIZER_NEEDS_SECTION = Rule(
    id="dummy-optimizer-needs-section",
    severity=Severity.ERROR,
    summary="DummyOptim needs an optimizer section, which is missing",
    why="accelerate does not replace it: DeepSpeed creates the optimizer from its own file",
    fix="create a real optimizer in the script, or add an optimizer section to the DeepSpeed file",
    see=f"{ACCELERATE}/accelerator.py",
    find=because_of(Cause.NO_SECTION, Cause.NOT_AN_OPTIMIZER),
    evidence=fails("You cannot create a `DummyOptim` without specifying"),
)


RULES = declared(vars())
