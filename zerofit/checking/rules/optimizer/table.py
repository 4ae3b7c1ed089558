"""Behaviour of optimizers under ZeRO and offload, by their entries in the table of optimizers.

Each row describes optimizers with a trait (`core/optimizers/`) in a group of placements; the first matching
row counts.
`tests/evidence/optimizer_matrix` runs every row that a CPU can run, and compares it with this table.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, replace
from enum import StrEnum
from functools import cache

from zerofit.core.command import Route
from zerofit.core.optimizers.entry import Device, Swap, Update
from zerofit.core.optimizers.lookup import entry_of, ids_with, scripts_libraries
from zerofit.core.strategy import OffloadDevice, ZeroStage

OPTIMIZERS = ids_with(lambda entry: entry.library != "other")
"""All ids of the table of optimizers."""
OF_CONFIG = ids_with(lambda entry: entry.library == "config" and not entry.package and not entry.until)
"""Optimizers that DeepSpeed creates from optimizer.type: its own, and any class of torch.optim."""
REMOVED = ids_with(lambda entry: bool(entry.until))
"""Types of DeepSpeed's file that only earlier releases have."""
CONFIG_WITH_MUP = ids_with(lambda entry: entry.package == "mup")
EIGHT_BIT = ids_with(
    lambda entry: entry.library == "bitsandbytes" and entry.memory is not None and entry.memory.has_8_bit
)
TESTED = ids_with(lambda entry: entry.is_tested)
"""DeepSpeed accepts them with ZeRO by default."""
_OF_CPU = ids_with(lambda entry: entry.device is Device.CPU)
_OF_GPU = ids_with(lambda entry: entry.device is Device.GPU and entry.library in ("deepspeed", "apex"))
_UNTRIED = ids_with(lambda entry: entry.device is Device.GPU and entry.library == "bitsandbytes")
_NEEDS_CLOSURE = ids_with(lambda entry: entry.needs_closure)
_REBUILT = ids_with(lambda entry: entry.is_rebuilt)
_OFFLOADING = ids_with(lambda entry: entry.memory is not None and entry.memory.offloads_from is not None)
_MUON = ("config.Muon", "deepspeed.MuonWithAuxAdam")


def _updates(*kinds: Update) -> tuple[str, ...]:
    return ids_with(lambda entry: entry.update in kinds)


def _swaps(*kinds: Swap) -> tuple[str, ...]:
    return ids_with(lambda entry: entry.swap in kinds)


def in_group(optimizer: str, group: tuple[str, ...]) -> bool:
    """Return True if an id matches a group, where "torch.*" matches a prefix, and "*" everything."""
    return optimizer in group or any(
        name.endswith("*") and optimizer.startswith(name.removesuffix("*")) for name in group
    )


class OptimizerAnswer(StrEnum):
    """The behaviour of an optimizer in a placement."""

    ALLOWED = "allowed"
    """It trains as without sharding."""
    DIFFERENT = "allowed, but numerically different"
    """The requested optimizer runs, but sharding changes its result."""
    WRONG = "silently wrong"
    """Another optimizer runs, silently."""
    REFUSED = "refused"
    """The run ends in an error."""
    UNKNOWN = "not known"
    """Not measured, and not determined by the libraries' source."""


class Cause(StrEnum):
    """The reason for a placement's behaviour, in a few words."""

    ELEMENTWISE = "its update is elementwise, so sharding has no effect"
    NOT_SHARDED = "nothing is partitioned"
    SAME_ON_CPU = "DeepSpeed's CPU Adam replaces it with the same result"
    SAME_WITHOUT_DECAY = "DeepSpeed's CPU Adam replaces it, without weight decay with the same result"
    SWAPPED = "accelerate replaces it by DeepSpeed's CPU Adam"
    SWAPPED_ADAM = "accelerate replaces it by DeepSpeed's CPU Adam, in fp32 and with Adam's weight decay"
    SWAP_KEEPS_GROUPS = "accelerate passes its parameter groups to DeepSpeed's CPU Adam, which can't use them"
    SWAP_ARGUMENT = "accelerate passes adamw_mode to DeepSpeed's CPU Adagrad or Lion, which refuse it"
    REFUSED_CLIENT = "with offload DeepSpeed only accepts its own CPU Adam and Lion"
    UNTESTED = "DeepSpeed has not tested it with ZeRO, and requires zero_allow_untested_optimizer"
    WHOLE_TENSORS = "its update uses factors or norms of whole tensors, and ZeRO passes it flat shards"
    TWO_WEIGHTS = "its train() and eval() exchange two sets of weights, of which ZeRO keeps one"
    NEEDS_MATRICES = "it only supports matrices, and ZeRO passes it flat shards"
    REBUILT = "ZeRO creates a new Adagrad from its defaults, without its groups' settings and its scheduler"
    GATHERED = "DeepSpeed gathers each matrix for its step"
    REDUCE_SCATTER = "at stage 3 DeepSpeed's Muon needs zero_optimization.reduce_scatter: false"
    BLOCKS = "flat shards split its 8-bit blocks differently"
    BF16_STEPS = "it orthogonalises in bf16, where the order of sums matters"
    DECOUPLED = "DeepSpeed treats Adam as AdamW unless adam_w_mode is false"
    NO_SUCH_TYPE = "neither DeepSpeed nor torch.optim has an optimizer of this name"
    NO_SECTION = "it needs an optimizer section, which is missing"
    NOT_AN_OPTIMIZER = "it is accelerate's placeholder, and DeepSpeed needs a real optimizer"
    ON_GPU = "it steps on the CPU, and without offload its parameters are on the GPU"
    ON_CPU = "it steps on the GPU, and offload keeps its parameters on the CPU"
    GPU_KERNEL = "its kernel is for GPUs"
    OWN_COPIES = "it steps its own copies of the weights in host memory"
    NEEDS_CLOSURE = "its step() needs a closure, which DeepSpeed's engine does not pass on"
    NEEDS_MUP = "the package mup makes it"
    NOT_MEASURED = "not measured"


@dataclass(frozen=True, slots=True)
class OptimizerRow:
    """The behaviour of some optimizers in some placements. None, or all stages and routes, mean "any"."""

    optimizers: tuple[str, ...]
    """Ids; "torch.*" matches a prefix, "*" everything."""
    answer: OptimizerAnswer
    cause: Cause
    _: KW_ONLY
    but_not: tuple[str, ...] = ()
    """Ids that these patterns match and the row excludes."""
    stages: tuple[ZeroStage, ...] = tuple(ZeroStage)
    routes: tuple[Route, ...] = tuple(Route)
    offloads_optimizer: bool | None = None
    forces_cpu_optimizer: bool | None = None
    allows_untested: bool | None = None
    error: tuple[float, float] | None = None
    """Minimum and maximum measured relative error of the weights, if above 1e-4; 1e6 stands for weights that
    are no longer finite."""
    says: str = ""
    """Part of the error message, if refused."""
    not_run: str = ""
    """The hardware that a measurement needs beyond a CPU; the evidence is the libraries' source."""


_SHARDED = (ZeroStage.OPTIMIZER_STATES, ZeroStage.GRADIENTS, ZeroStage.PARAMETERS)
_HOOKED = (Route.ACCELERATE, Route.TRAINER)
_NATIVE = (Route.NATIVE,)


@cache
def verdict(
    optimizer: str,
    *,
    zero_stage: ZeroStage,
    optimizer_offload: OffloadDevice,
    forces_cpu_optimizer: bool,
    route: Route,
    allows_untested: bool = False,
) -> OptimizerRow:
    """Return the row of a combination. Every combination has one; parameter offload changes none.

    Args:
        optimizer: its id; unknown ids get what accelerate and DeepSpeed do with any optimizer.
        zero_stage: what is partitioned.
        optimizer_offload: where the optimizer's states are; cpu and nvme give the same answers.
        forces_cpu_optimizer: DeepSpeed's zero_force_ds_cpu_optimizer, true by default.
        route: the library that passes the optimizer to DeepSpeed.
        allows_untested: DeepSpeed's zero_allow_untested_optimizer; accelerate and Trainer set it for the
            script's own optimizers.
    """
    offloads = optimizer_offload is not OffloadDevice.NONE
    for row in ROWS:
        if (
            zero_stage in row.stages
            and route in row.routes
            and row.offloads_optimizer in (None, offloads)
            and row.forces_cpu_optimizer in (None, forces_cpu_optimizer)
            and row.allows_untested in (None, allows_untested)
            and in_group(optimizer, row.optimizers)
            and optimizer not in row.but_not
        ):
            entry = entry_of(optimizer)
            if entry is None or not entry.not_run or row.not_run:
                return row
            return replace(row, error=None, not_run=entry.not_run)
    raise AssertionError(f"no row for {optimizer}")


_SCRIPTS_OWN = (*(f"{library}.*" for library in scripts_libraries()), "other:*")
_KNOWN = ids_with(lambda entry: not entry.until)

_GPU = "a GPU"
_ALLOWED, _DIFFERENT, _WRONG, _REFUSED, _UNKNOWN = OptimizerAnswer

ROWS = (
    # Placeholders and names.
    OptimizerRow(
        ("accelerate.DummyOptim",),
        _REFUSED,
        Cause.NO_SECTION,
        routes=_HOOKED,
        says="cannot create a `DummyOptim` without specifying an optimizer in the config file",
    ),
    OptimizerRow(
        ("accelerate.DummyOptim",),
        _REFUSED,
        Cause.NOT_AN_OPTIMIZER,
        says="Client Optimizer is of unexpected type",
    ),
    OptimizerRow(_OFFLOADING, _UNKNOWN, Cause.OWN_COPIES, not_run=_GPU),
    OptimizerRow(CONFIG_WITH_MUP, _UNKNOWN, Cause.NEEDS_MUP, not_run="the package mup"),
    OptimizerRow(
        ("config.SparseAdam",), _UNKNOWN, Cause.NOT_MEASURED, not_run="a model with sparse gradients"
    ),
    # DeepSpeed's optimizer section: nothing is replaced or refused under offload.
    OptimizerRow(("config.Lion",), _ALLOWED, Cause.GPU_KERNEL, offloads_optimizer=False, not_run=_GPU),
    OptimizerRow(
        ("config.Lamb",), _REFUSED, Cause.UNTESTED, stages=_SHARDED, allows_untested=False, not_run=_GPU
    ),
    OptimizerRow(("config.Lamb",), _REFUSED, Cause.ON_CPU, offloads_optimizer=True, not_run=_GPU),
    OptimizerRow(("config.Lamb",), _DIFFERENT, Cause.WHOLE_TENSORS, stages=_SHARDED, not_run=_GPU),
    OptimizerRow(("config.Lamb",), _ALLOWED, Cause.NOT_SHARDED, not_run=_GPU),
    OptimizerRow(
        tuple(name for name in OF_CONFIG if name not in TESTED),
        _REFUSED,
        Cause.UNTESTED,
        stages=_SHARDED,
        allows_untested=False,
        says="You are using an untested ZeRO Optimizer",
    ),
    OptimizerRow(("config.Adam",), _DIFFERENT, Cause.DECOUPLED, error=(0.87, 0.87)),
    OptimizerRow(("config.Adagrad",), _ALLOWED, Cause.ELEMENTWISE, offloads_optimizer=True),
    OptimizerRow(("config.AdamW", "config.Lion"), _ALLOWED, Cause.ELEMENTWISE),
    # DeepSpeed's kernels without a CPU counterpart: they can't even be created there.
    *(
        OptimizerRow(
            _OF_GPU,
            answer,
            cause,
            routes=routes,
            offloads_optimizer=True,
            forces_cpu_optimizer=True,
            not_run=_GPU,
        )
        for routes, answer, cause in (
            (_HOOKED, _WRONG, Cause.SWAPPED),
            (_NATIVE, _REFUSED, Cause.REFUSED_CLIENT),
        )
    ),
    OptimizerRow(
        _OF_GPU,
        _REFUSED,
        Cause.UNTESTED,
        but_not=TESTED,
        stages=_SHARDED,
        routes=_NATIVE,
        allows_untested=False,
        not_run=_GPU,
    ),
    # The script's own optimizer, passed to DeepSpeed by the script.
    OptimizerRow(
        ("deepspeed.DeepSpeedCPUAdam", "deepspeed.DeepSpeedCPULion"),
        _ALLOWED,
        Cause.ELEMENTWISE,
        routes=_NATIVE,
        offloads_optimizer=True,
    ),
    OptimizerRow(
        _SCRIPTS_OWN,
        _REFUSED,
        Cause.REFUSED_CLIENT,
        routes=_NATIVE,
        offloads_optimizer=True,
        forces_cpu_optimizer=True,
        says="You are using ZeRO-Offload with a client provided optimizer",
    ),
    OptimizerRow(
        _SCRIPTS_OWN,
        _REFUSED,
        Cause.UNTESTED,
        but_not=TESTED,
        stages=_SHARDED,
        routes=_NATIVE,
        allows_untested=False,
        says="You are using an untested ZeRO Optimizer",
    ),
    # The script's own optimizer under offload: accelerate's replacements.
    *(
        OptimizerRow(
            optimizers,
            answer,
            cause,
            routes=_HOOKED,
            offloads_optimizer=True,
            forces_cpu_optimizer=True,
            error=error,
            says=says,
        )
        for optimizers, answer, cause, error, says in (
            (_swaps(Swap.SAME), _ALLOWED, Cause.SAME_ON_CPU, None, ""),
            (
                _swaps(Swap.FAILS_ON_EPS),
                _REFUSED,
                Cause.SWAP_KEEPS_GROUPS,
                None,
                "adam_update(): incompatible function",
            ),
            (
                _swaps(Swap.FAILS_ON_BETAS),
                _REFUSED,
                Cause.SWAP_KEEPS_GROUPS,
                None,
                "too many values to unpack",
            ),
            (
                _swaps(Swap.FAILS_AS_ADAGRAD),
                _REFUSED,
                Cause.SWAP_ARGUMENT,
                None,
                "DeepSpeedCPUAdagrad.__init__() got an unexpected keyword argument 'adamw_mode'",
            ),
            (
                _swaps(Swap.FAILS_AS_LION),
                _REFUSED,
                Cause.SWAP_ARGUMENT,
                None,
                "DeepSpeedCPULion.__init__() got an unexpected keyword argument 'adamw_mode'",
            ),
            (_swaps(Swap.SAME_WITHOUT_DECAY), _ALLOWED, Cause.SAME_WITHOUT_DECAY, None, ""),
            (_swaps(Swap.ADAM), _WRONG, Cause.SWAPPED_ADAM, (1.1, 1.5), ""),
            (_swaps(Swap.UNBOUNDED), _WRONG, Cause.SWAPPED, (1e6, 1e6), ""),
            (_SCRIPTS_OWN, _WRONG, Cause.SWAPPED, (0.28, 460.0), ""),
        )
    ),
    # DeepSpeed's kernels, each for one kind of memory.
    OptimizerRow(
        _OF_CPU, _REFUSED, Cause.ON_GPU, offloads_optimizer=False, says="must be 'cpu'", not_run=_GPU
    ),
    OptimizerRow(_OF_CPU, _ALLOWED, Cause.ELEMENTWISE),
    OptimizerRow(
        (*_OF_GPU, "deepspeed.FusedAdam"), _REFUSED, Cause.ON_CPU, offloads_optimizer=True, not_run=_GPU
    ),
    OptimizerRow(
        tuple(name for name in _OF_GPU if name in _updates(Update.WHOLE_TENSOR)),
        _DIFFERENT,
        Cause.WHOLE_TENSORS,
        stages=_SHARDED,
        not_run=_GPU,
    ),
    OptimizerRow(_OF_GPU, _ALLOWED, Cause.GPU_KERNEL, not_run=_GPU),
    OptimizerRow(("deepspeed.FusedAdam",), _ALLOWED, Cause.ELEMENTWISE),
    # The optimizer itself, on shards.
    OptimizerRow(
        _MUON,
        _REFUSED,
        Cause.REDUCE_SCATTER,
        stages=(ZeroStage.PARAMETERS,),
        says="Muon and reduce scatter cannot be used together",
    ),
    OptimizerRow(_MUON, _ALLOWED, Cause.GATHERED),
    OptimizerRow(_UNTRIED, _UNKNOWN, Cause.GPU_KERNEL, not_run=_GPU),
    OptimizerRow(
        _NEEDS_CLOSURE,
        _REFUSED,
        Cause.NEEDS_CLOSURE,
        says="step() missing 1 required positional argument: 'closure'",
    ),
    OptimizerRow(
        _updates(Update.MATRIX),
        _REFUSED,
        Cause.NEEDS_MATRICES,
        stages=_SHARDED,
        says="Param gradient must be a 2D matrix",
    ),
    OptimizerRow(("torch.Muon",), _DIFFERENT, Cause.BF16_STEPS, error=(0.027, 0.027)),
    OptimizerRow(_REBUILT, _DIFFERENT, Cause.REBUILT, stages=_SHARDED, error=(0.49, 0.5)),
    OptimizerRow(
        _updates(Update.WHOLE_TENSOR),
        _DIFFERENT,
        Cause.WHOLE_TENSORS,
        stages=_SHARDED,
        error=(0.072, 0.63),
    ),
    OptimizerRow(_updates(Update.BLOCK), _DIFFERENT, Cause.BLOCKS, stages=_SHARDED, error=(0.0028, 0.028)),
    OptimizerRow(
        _updates(Update.TWO_WEIGHTS),
        _DIFFERENT,
        Cause.TWO_WEIGHTS,
        stages=_SHARDED,
        not_run="the package schedulefree",
    ),
    OptimizerRow(_KNOWN, _ALLOWED, Cause.NOT_SHARDED, stages=(ZeroStage.NOTHING,)),
    OptimizerRow(_KNOWN, _ALLOWED, Cause.ELEMENTWISE),
    # Unknown optimizers.
    OptimizerRow(("config.*",), _REFUSED, Cause.NO_SUCH_TYPE, says="is not a supported DeepSpeed Optimizer"),
    OptimizerRow(("*",), _ALLOWED, Cause.NOT_SHARDED, stages=(ZeroStage.NOTHING,)),
    OptimizerRow(("*",), _UNKNOWN, Cause.NOT_MEASURED, not_run="the optimizer itself"),
)
"""The table: the first matching row counts."""
