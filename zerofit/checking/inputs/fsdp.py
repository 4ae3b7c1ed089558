"""Settings of FSDP as fields of Strategy and Topology; those of version 1 are translated to FSDP2."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from zerofit.checking.inputs.fsdp_words import (
    BLOCKS,
    FALSE,
    KEEPS_WEIGHTS,
    STRATEGIES,
    TRUE,
    FsdpWords,
    number_of,
    refused,
)
from zerofit.core.errors import UserError
from zerofit.core.strategy import Engine, OffloadDevice, StateDictType

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from zerofit.core.setting import Said

_HYBRID = ("HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
_NO_SHARD = "NO_SHARD"
_STATE_DICTS = ("FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT")
"""accelerate/utils/constants.py, FSDP_STATE_DICT_TYPE, with positions as torch's StateDictType."""
_OFFLOADS = ("offload_params", "cpu_offload")
"""accelerate's name, and Trainer's."""
_BUILT_IN = (
    "backward_prefetch",
    "backward_prefetch_policy",
    "forward_prefetch",
    "use_orig_params",
    "sync_module_states",
    "limit_all_gathers",
)
"""What version 1 has settings for and FSDP2 always does: accelerate/commands/to_fsdp2.py removes them too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FsdpSettings:
    """The same settings as zerofit has them."""

    said: Mapping[str, Said[Any]]
    """By field of Strategy and Topology."""
    notes: tuple[str, ...] = ()
    """What was translated or left out, one sentence each."""


def read_fsdp(words: FsdpWords) -> FsdpSettings:
    """Return settings of FSDP as fields of Strategy and Topology.

    Raises:
        UserError: accelerate refuses a value, or FSDP2 has nothing like it.
    """
    return _Reading(words).settings()


class _Reading:
    """One reading of a source's settings."""

    def __init__(self, words: FsdpWords) -> None:
        self._words, self._keys = words, words.keys
        self._said: dict[str, Said[Any]] = {}
        self._notes = [*words.notes]
        version = self._keys.get("version")
        default = words.default_version
        if words.is_partial:  # a switch means the same in both
            key = self._keys.get("reshard_after_forward")
            is_switch = key is not None and str(key.value).lower() in (*TRUE, *FALSE)
            default = 2 if is_switch and "sharding_strategy" not in self._keys else 1
        self._version = default if version is None else number_of(version, (1, 2))

    def settings(self) -> FsdpSettings:
        self._refuse_what_has_no_counterpart()
        strategy = self._strategy()
        if strategy is not None and strategy.value == _NO_SHARD:
            note = f"NO_SHARD ({strategy.where}) is data parallelism without sharding: DDP"
            return FsdpSettings(said={"engine": replace(strategy, value=Engine.NATIVE)}, notes=(note,))
        if self._version == 1 and (not self._words.is_partial or "version" in self._keys):
            where = self._words.uses.where
            self._notes.append(f"FSDP version 1 ({where}) is planned as FSDP2, its successor")
        if not self._words.is_partial:
            self._said["engine"] = replace(self._words.uses, value=Engine.FSDP2)
        self._resharding()
        self._state_dict()
        self._offload()
        self._checkpointing()
        self._copies()
        self._units()
        self._built_in()
        return FsdpSettings(said=self._said, notes=tuple(self._notes))

    def _checkpointing(self) -> None:
        recomputes = self._keys.get("activation_checkpointing")
        is_on = recomputes is not None and _switch(recomputes)
        if recomputes is not None and is_on:
            self._said["gradient_checkpointing"] = replace(recomputes, value=True)
        offload = self._keys.get("activation_checkpointing_offload")
        if offload is None or not _switch(offload):
            return
        if not self._words.is_partial and not (is_on and self._version == 2):
            why = "it needs fsdp_activation_checkpointing: true and fsdp_version: 2"
            raise refused(offload, why=why, fix="write both, or leave it out")
        self._said["activation_offload"] = replace(offload, value=True)

    def _strategy(self) -> Said[Any] | None:
        """Return the sharding strategy of version 1; None if none is given, and under version 2."""
        names = ("sharding_strategy", "reshard_after_forward")  # of two accelerate takes the first
        key = next((self._keys[name] for name in names if name in self._keys), None)
        return None if key is None or self._version == 2 else replace(key, value=_word(key, STRATEGIES))

    def _resharding(self) -> None:
        """Read whether gathered weights are freed, and over which ranks they are sharded."""
        if self._version == 2:
            if "reshard_after_forward" in self._keys:
                key = self._keys["reshard_after_forward"]
                self._said["reshard_after_forward"] = replace(key, value=_switch(key))
            if (older := self._keys.get("sharding_strategy")) is not None:
                self._notes.append(f"sharding_strategy ({older.where}) has no effect under version 2")
                if str(older.value).upper() in _HYBRID:
                    self._notes[-1] += "; copies of the weights are dp_replicate_size in parallelism_config"
            return
        strategy = self._strategy()
        if strategy is None:
            return
        keeps = strategy.value in KEEPS_WEIGHTS
        self._said["reshard_after_forward"] = replace(strategy, value=not keeps)
        state = "off" if keeps else "on"
        self._notes.append(f"{strategy.value} ({strategy.where}) is reshard_after_forward {state}")
        if strategy.value in _HYBRID:
            nodes = self._words.num_nodes
            self._notes[-1] += f", sharded within each node: dp_replicate_size {nodes}"
            if nodes > 1:
                self._said["dp_replicate_size"] = replace(strategy, value=nodes)

    def _offload(self) -> None:
        key = next((self._keys[name] for name in _OFFLOADS if name in self._keys), None)
        is_on = key is not None and _switch(key)
        if key is not None and (is_on or self._words.is_partial):
            device = replace(key, value=OffloadDevice.CPU if is_on else OffloadDevice.NONE)
            self._said |= {"optimizer_offload": device, "param_offload": device}

    def _copies(self) -> None:
        key = self._keys.get("dp_replicate_size")
        if key is not None and _count(key) > 1:
            self._said["dp_replicate_size"] = replace(key, value=_count(key))

    def _state_dict(self) -> None:
        key = self._keys.get("state_dict_type")
        if key is None and self._words.is_partial:
            return
        if key is None:
            kind = self._words.default_state_dict[self._version]
            if StateDictType(kind) is not StateDictType.SHARDED:
                self._said["state_dict_type"] = replace(self._words.uses, value=StateDictType(kind))
            return
        kind = _word(key, _STATE_DICTS)
        if kind == "LOCAL_STATE_DICT":
            if self._version == 2:
                raise refused(key, why="FSDP2 has no LOCAL_STATE_DICT", fix="write SHARDED_STATE_DICT")
            self._notes.append(f"LOCAL_STATE_DICT ({key.where}) is SHARDED_STATE_DICT under FSDP2")
            kind = "SHARDED_STATE_DICT"
        self._said["state_dict_type"] = replace(key, value=StateDictType(kind))

    def _units(self) -> None:
        """Say which units are sharded, where it is not by blocks."""
        key = self._keys.get("auto_wrap_policy")
        default = BLOCKS if self._words.is_partial else self._words.default_policy
        policy = default if key is None else str(key.value).upper()
        if policy != BLOCKS:
            where = f"{policy} ({key.where})" if key else f"no auto_wrap_policy ({self._words.uses.where})"
            self._notes.append(f"{where}: zerofit shards by the model's blocks, _no_split_modules")

    def _built_in(self) -> None:
        """Say which settings are left out, as FSDP2 has only one way."""
        given = [self._keys[name] for name in _BUILT_IN if name in self._keys]
        if given:
            names = ", ".join(name for name in _BUILT_IN if name in self._keys)
            self._notes.append(f"without {names} ({given[0].where}): FSDP2 has one way for each")

    def _refuse_what_has_no_counterpart(self) -> None:
        for name, (is_set, why) in _NOT_TAKEN.items():
            key = self._keys.get(name)
            if key is not None and is_set(key):
                raise _not_taken(key, why=why)


def _switch(key: Said[Any]) -> bool:
    """Return the value of a switch, as accelerate reads it.

    Raises:
        UserError: accelerate refuses it.
    """
    text = str(key.value).lower()
    if text not in (*TRUE, *FALSE):
        raise refused(key, why="it is a switch", fix="write true or false")
    return text in TRUE


def _count(key: Said[Any]) -> int:
    if not str(key.value).isdigit() or int(key.value) < 1:
        raise refused(key, why="it is a whole number of at least 1", fix="write 1 to shard over all ranks")
    return int(key.value)


def _word(key: Said[Any], words: tuple[str, ...]) -> str:
    """Return one of some words, written in any case or as its number.

    Raises:
        UserError: it is none of them.
    """
    text = str(key.value).upper()
    text = {"TRUE": words[0], "FALSE": words[1]}.get(text, text) if words == STRATEGIES else text
    if text in words:
        return text
    if text.isdigit() and 0 < int(text) <= len(words):
        return words[int(text) - 1]
    raise refused(key, why=f"it is one of {', '.join(words)}", fix=f"write {words[0]}")


_NOT_TAKEN: dict[str, tuple[Callable[[Said[Any]], bool], str]] = {
    "ignored_modules": (
        lambda key: bool(key.value),
        "ranks don't exchange the gradients of ignored modules, and each would train its own",
    ),
    "xla": (_switch, "zerofit plans for NVIDIA GPUs"),
    "cp_size": (lambda key: _count(key) > 1, "zerofit has no context parallelism"),
}
"""Settings that can't be left out and have no counterpart: whether one is set, and the reason."""


def _not_taken(key: Said[Any], *, why: str) -> UserError:
    return UserError(
        "fsdp-setting-not-taken",
        "zerofit has nothing like a setting of FSDP",
        found=f"{key.text}   ({key.place})" if key.place else key.text,
        why=why,
        fix="leave it out",
    )
