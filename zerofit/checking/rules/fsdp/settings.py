"""Rules on the settings of FSDP: in accelerate's file and flags, in the script's plugin, in fsdp_config."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zerofit.checking.inputs.accelerate import launch_of
from zerofit.checking.inputs.fsdp_run import (
    FSDP_SECTION,
    PREFIX,
    FsdpSource,
    fsdp_of,
    settings_of_launch,
    truth_of,
    uses_fsdp,
)
from zerofit.checking.inputs.fsdp_words import KEEPS_WEIGHTS, STRATEGIES
from zerofit.checking.rule import ACCELERATE, Hit, Rule, Severity, declared, fails, hit_of, ignored
from zerofit.checking.rules.script.hits import unguarded_calls
from zerofit.checking.situation import known
from zerofit.configs.schema import expected, is_in_range
from zerofit.core.command import is_literal
from zerofit.scripts.facts import Action

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from zerofit.checking.inputs.fsdp_run import FsdpRun
    from zerofit.checking.situation import Situation
    from zerofit.core.setting import Said

_PLUGIN = f"{ACCELERATE}/utils/dataclasses.py"
_LAUNCH = f"{ACCELERATE}/utils/launch.py"
_FULL = ("FULL_SHARD", "1")
_KEEPING = ("SHARD_GRAD_OP", "2")
_KEEPS = (*KEEPS_WEIGHTS, *(str(STRATEGIES.index(name) + 1) for name in KEEPS_WEIGHTS))
"""Strategies of version 1 that mean reshard_after_forward: false, by name and by number."""


def under_fsdp(
    *sources: FsdpSource, version: int | None = None
) -> Callable[[Callable[[Situation, FsdpRun], Iterator[Hit]]], Callable[[Situation], Iterator[Hit]]]:
    """Return a decorator that restricts a predicate to runs under FSDP, and passes their settings.

    Args:
        sources: of the settings; any if none is given.
        version: of FSDP; None for both.
    """

    def decorate(
        find: Callable[[Situation, FsdpRun], Iterator[Hit]],
    ) -> Callable[[Situation], Iterator[Hit]]:
        def found(situation: Situation) -> Iterator[Hit]:
            fsdp = fsdp_of(situation)
            if fsdp is None or (sources and fsdp.source not in sources):
                return
            if version is None or fsdp.version == version:
                yield from find(situation, fsdp)

        return found

    return decorate


@Rule(
    id="fsdp-value-refused",
    severity=Severity.ERROR,
    summary="accelerate refuses a value of FSDP",
    why="FullyShardedDataParallelPlugin converts each setting when the Accelerator is made, and only takes "
    "these values",
    fix="write one of its values",
    see=_PLUGIN,
    evidence=fails("Invalid auto wrap policy: TRANSFORMER_WRAP"),
)
@under_fsdp()
def _refused_values(situation: Situation, fsdp: FsdpRun) -> Iterator[Hit]:
    flags = known(situation.schemas, "the flags of accelerate launch").accelerate_launch.root
    for name, said in fsdp.said.items():
        key = flags.find(f"{PREFIX}{name}")
        # launch-flag-value reports flags.
        is_read = name not in _UNREAD.get(fsdp.version or 0, ()) and said.place is not None
        if key is None or not key.choices or not is_read or isinstance(said.value, (list, tuple, dict)):
            continue
        is_exact = fsdp.source is FsdpSource.TRAINER and name == "auto_wrap_policy"
        is_right = is_in_range(key, said.value) and not (is_exact and said.value not in key.choices)
        if not is_right and is_literal(str(said.value)):
            words = [choice for choice in key.choices if not str(choice).isdigit()] or list(key.choices)
            shown = "true or false" if "true" in words else f"one of {', '.join(map(str, words))}"
            yield hit_of(said, f", but accelerate expects {shown if len(words) > 2 else expected(key)}")


_UNREAD = {
    2: ("sharding_strategy", "use_orig_params", "sync_module_states", "forward_prefetch"),
    1: (),
}
"""Settings that version 2 does not read from the launcher."""


@Rule(
    id="fsdp2-reshard-is-boolean",
    severity=Severity.ERROR,
    summary="reshard_after_forward is true or false under FSDP 2",
    why="names of sharding strategies, such as FULL_SHARD, are version 1's; version 2 reads a boolean",
    fix="write true to free gathered weights after forward, as FULL_SHARD does, or false as SHARD_GRAD_OP",
    see=_PLUGIN,
    evidence=fails("invalid truth value full_shard"),
)
@under_fsdp(version=2)
def _named_resharding(situation: Situation, fsdp: FsdpRun) -> Iterator[Hit]:
    said = fsdp.find("reshard_after_forward")
    if said is not None and truth_of(said.value) is None and is_literal(str(said.value)):
        right = "false" if str(said.value).upper().lstrip("_") in _KEEPS else "true"
        yield hit_of(said, f" with version {fsdp.version}", fix=f"write {right}")


@Rule(
    id="fsdp2-ignores-sharding-strategy",
    severity=Severity.WARNING,
    summary="FSDP 2 ignores sharding_strategy",
    why="version 2 reads reshard_after_forward alone, which is true by default, as FULL_SHARD",
    fix="write reshard_after_forward: false for SHARD_GRAD_OP, and for HYBRID_SHARD dp_replicate_size in "
    "parallelism_config",
    see=_PLUGIN,
    evidence=ignored(("reshards_after_forward", True)),
)
@under_fsdp(FsdpSource.LAUNCH, FsdpSource.PLUGIN, version=2)
def _lost_strategy(situation: Situation, fsdp: FsdpRun) -> Iterator[Hit]:
    said = fsdp.find("sharding_strategy")
    if said is not None and is_literal(str(said.value)) and not _says_the_same(said, fsdp):
        yield hit_of(said, " with FSDP 2")


def _says_the_same(said: Said[Any], fsdp: FsdpRun) -> bool:
    """Return True if version 2 does what a strategy of version 1 says, though it does not read it."""
    resharding = fsdp.find("reshard_after_forward")
    frees = True if resharding is None else truth_of(resharding.value)
    strategy = str(said.value).upper()
    return strategy in _FULL if frees is not False else strategy in _KEEPING


@Rule(
    id="fsdp2-sharding-strategy-unread",
    severity=Severity.ADVICE,
    summary="FSDP 2 does not read sharding_strategy",
    why="version 2 reads reshard_after_forward alone, which says the same here",
    fix="leave sharding_strategy out",
    see=_PLUGIN,
    evidence=ignored(not_reproduced="a run does the same with and without it"),
)
@under_fsdp(FsdpSource.LAUNCH, FsdpSource.PLUGIN, version=2)
def _unread_strategy(situation: Situation, fsdp: FsdpRun) -> Iterator[Hit]:
    said = fsdp.find("sharding_strategy")
    if said is not None and is_literal(str(said.value)) and _says_the_same(said, fsdp):
        yield hit_of(said, " with FSDP 2")


@Rule(
    id="fsdp1-ignores-reshard-after-forward",
    severity=Severity.WARNING,
    summary="FSDP 1 ignores reshard_after_forward",
    why="sharding_strategy takes precedence, and the launcher passes FULL_SHARD where the user sets none",
    fix="write sharding_strategy: SHARD_GRAD_OP, or version 2 with reshard_after_forward: false",
    see=f"{_PLUGIN}#L1810",
    evidence=ignored(not_reproduced="needs a GPU: FSDP 1 takes no CPU ranks"),
)
@under_fsdp(version=1)
def _lost_resharding(situation: Situation, fsdp: FsdpRun) -> Iterator[Hit]:
    said, strategy = fsdp.find("reshard_after_forward"), fsdp.find("sharding_strategy")
    if said is None or not is_literal(str(said.value)) or not fsdp.is_complete:
        return
    wanted, counts = str(said.value).upper(), str(strategy.value).upper() if strategy else _FULL[0]
    # accelerate's own files have true for FULL_SHARD.
    if wanted not in (*_FULL, "TRUE", counts):
        yield hit_of(said, f", but {strategy.text if strategy else 'no sharding_strategy'}")


@Rule(
    id="fsdp2-has-no-forward-prefetch",
    severity=Severity.ERROR,
    summary="FSDP 2 has no forward_prefetch",
    why="the plugin refuses the argument under version 2, whatever its value",
    fix="leave forward_prefetch out",
    see=_PLUGIN,
    evidence=fails("forward_prefetch is not yet implemented in FSDP2"),
)
@under_fsdp(FsdpSource.PLUGIN, version=2)
def _forward_prefetch(situation: Situation, fsdp: FsdpRun) -> Iterator[Hit]:
    # What the launcher sets is not passed to the plugin, and has no effect.
    for call in unguarded_calls(situation, Action.MAKE_FSDP_PLUGIN):
        keyword = call.keyword("forward_prefetch")
        if keyword is not None and keyword.value is not None:
            yield hit_of(keyword.said)


@Rule(
    id="fsdp2-has-no-local-state-dict",
    severity=Severity.ERROR,
    summary="FSDP 2 has no LOCAL_STATE_DICT",
    why="its weights are DTensors, whose checkpoints are sharded or whole",
    fix="write SHARDED_STATE_DICT, or FULL_STATE_DICT for whole weights",
    see=_PLUGIN,
    evidence=fails("FSDP2 does not support LOCAL_STATE_DICT"),
)
@under_fsdp(version=2)
def _local_state_dict(situation: Situation, fsdp: FsdpRun) -> Iterator[Hit]:
    said = fsdp.find("state_dict_type")
    if said is not None and str(said.value).upper() in ("LOCAL_STATE_DICT", "2"):
        yield hit_of(said, " with FSDP 2")


@Rule(
    id="fsdp-efficient-loading-needs-sync",
    severity=Severity.ERROR,
    summary="cpu_ram_efficient_loading needs sync_module_states",
    why="only rank 0 loads weights, and the others must get them; accelerate's launcher asks for the setting "
    "under version 2 too",
    fix="write sync_module_states: true, or leave it out",
    see=_LAUNCH,
    evidence=fails("When using `--fsdp_cpu_ram_efficient_loading` set `--fsdp_sync_module_states`"),
)
@under_fsdp(FsdpSource.LAUNCH)
def _efficient_without_sync(situation: Situation, fsdp: FsdpRun) -> Iterator[Hit]:
    loading, sync = fsdp.find("cpu_ram_efficient_loading"), fsdp.find("sync_module_states")
    # The launcher tests values as Python does: the text "false", also of a flag, is true.
    is_on = loading is None or bool(loading.value)
    if is_on and sync is not None and sync.value is False:
        yield hit_of(sync, f" with {loading.text if loading else 'no fsdp_cpu_ram_efficient_loading'}")


@Rule(
    id="fsdp-checkpoint-offload-needs-checkpointing",
    severity=Severity.ERROR,
    summary="activation_checkpointing_offload needs activation_checkpointing and FSDP 2",
    why="it moves the inputs of recomputed blocks to host memory, and without recomputation there are none",
    fix="write activation_checkpointing: true and version: 2, or leave the offload out",
    see=_PLUGIN,
    evidence=fails("`activation_checkpointing_offload=True` requires `activation_checkpointing=True`"),
)
@under_fsdp(FsdpSource.LAUNCH, FsdpSource.PLUGIN)
def _offload_alone(situation: Situation, fsdp: FsdpRun) -> Iterator[Hit]:
    said, checkpointing = fsdp.find("activation_checkpointing_offload"), fsdp.find("activation_checkpointing")
    if said is None or truth_of(said.value) is not True:
        return
    if fsdp.has_default("activation_checkpointing") or (
        checkpointing is not None and truth_of(checkpointing.value) is False
    ):
        yield hit_of(said, f" with {checkpointing.text if checkpointing else 'no activation_checkpointing'}")
    elif fsdp.version == 1:
        yield hit_of(said, " with FSDP 1")


@Rule(
    id="fsdp-settings-without-fsdp",
    severity=Severity.WARNING,
    summary="settings of FSDP have no effect without FSDP",
    why="only --use_fsdp or distributed_type: FSDP makes accelerate shard; without them each rank has the "
    "whole model",
    fix="add --use_fsdp, or write distributed_type: FSDP",
    see=f"{ACCELERATE}/commands/launch.py",
    evidence=ignored(("fsdp_version", "not observed")),
)
def _without_fsdp(situation: Situation) -> Iterator[Hit]:
    launch = launch_of(situation)
    if launch is None or uses_fsdp(launch) is not None or fsdp_of(situation) is not None:
        return
    command, file = launch.command, launch.file
    if command is not None and file is None and command.find("config_file") is not None:
        return  # it could not be read
    given = [said for _, said in settings_of_launch(launch)]
    flags = [said for said in given if said.place is None]
    if flags:
        text = " ".join(said.text for said in flags)
        yield Hit(found=f"{text} without --use_fsdp")
    elif given and file is not None and file.value("distributed_type") not in (None, "FSDP"):
        behind = file.said("distributed_type")
        yield hit_of(
            given[0],
            f" with {behind.text if behind else ''}",
            fix=f"write distributed_type: FSDP, or remove {FSDP_SECTION}",
        )


RULES = declared(vars())
