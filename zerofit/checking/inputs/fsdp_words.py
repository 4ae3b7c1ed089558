"""FSDP in the words of its users: a launch line, accelerate's file, TrainingArguments."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from zerofit.configs.document import Entries, Format
from zerofit.configs.text.read import decode, read_document
from zerofit.core.errors import Unreadable, UserError
from zerofit.core.setting import Said
from zerofit.core.supported import release_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from zerofit.checking.situation import Situation
    from zerofit.configs.document import Document
    from zerofit.core.command import LaunchCommand

STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
"""accelerate/utils/constants.py, FSDP_SHARDING_STRATEGY; a number is a position in it, from 1."""
KEEPS_WEIGHTS = ("SHARD_GRAD_OP", "HYBRID_SHARD_ZERO2")
"""Those that keep gathered weights until the backward pass, as reshard_after_forward: false does."""
TRUE = ("y", "yes", "t", "true", "on", "1")
FALSE = ("n", "no", "f", "false", "off", "0")
"""accelerate/utils/environment.py, str_to_bool."""
BLOCKS = "TRANSFORMER_BASED_WRAP"
FSDP_FLAGS = ("parallelism_config_dp_replicate_size", "parallelism_config_cp_size")
"""Flags of `accelerate launch` on FSDP's groups of ranks."""
_OTHER_ENGINES = ("cpu", "multi_gpu", "tpu", "use_deepspeed", "use_megatron_lm")
"""Flags with which `accelerate launch` ignores the file's engine (accelerate/commands/launch.py, 1.15)."""
_WHOLE = "FULL_STATE_DICT"
_SECTION = "fsdp_config"
_PARALLELISM = "parallelism_config"


@dataclass(frozen=True, slots=True, kw_only=True)
class FsdpWords:
    """Settings of FSDP as a source has them: an accelerate file, a launch line, or TrainingArguments."""

    uses: Said[Any]
    """What turns FSDP on."""
    keys: Mapping[str, Said[Any]]
    """Each setting by accelerate's name without "fsdp_"."""
    default_version: int = 1
    """The version without `version`: accelerate's launcher takes 1, Trainer 2 from transformers 5.10 on."""
    default_policy: str = "NO_WRAP"
    """The wrap policy without `auto_wrap_policy`."""
    default_state_dict: Mapping[int, str] = field(
        default_factory=lambda: {1: _WHOLE, 2: "SHARDED_STATE_DICT"}
    )
    """The state dict type without `state_dict_type`, by version."""
    num_nodes: int = 1
    """Nodes of the run, over which HYBRID_SHARD copies the weights."""
    is_partial: bool = False
    """True if a file has the other settings, and the engine; what is not given here has no default then."""
    notes: tuple[str, ...] = ()
    """What the source sets without effect, a sentence each."""


def words_of_line(command: LaunchCommand, *, file: Document | None) -> FsdpWords | None:
    """Return the settings of FSDP in a line of `accelerate launch`; None if it runs another engine.

    Args:
        command: the line.
        file: the file that it names; None without, or if it can't be read.
    """
    uses = command.find("use_fsdp")
    keys = {
        flag.name.removeprefix("fsdp_").removeprefix(f"{_PARALLELISM}_"): Said(
            value=flag.value, text=flag.text
        )
        for flag in command.flags
        if flag.name.startswith("fsdp_") or flag.name in FSDP_FLAGS
    }
    is_partial = file is not None and words_of_accelerate(file, line=command) is not None
    if uses is None and not is_partial:
        return None
    nodes = command.find("num_machines")
    return FsdpWords(
        uses=Said(value="FSDP", text=uses.text if uses is not None else ""),
        keys={name: key for name, key in keys.items() if key.value is not None},
        num_nodes=_whole(None if nodes is None else nodes.value),
        is_partial=is_partial,
    )


def _whole(value: Any) -> int:
    """Return a number of nodes; 1 if it is none."""
    return int(value) if str(value).isdigit() and int(value) > 0 else 1


def said_by(command: LaunchCommand, name: str) -> Said[Any] | None:
    """Return a flag of a line with its value; None without it."""
    flag = command.find(name)
    return None if flag is None else Said(value=flag.value, text=flag.text)


def words_of_accelerate(
    file: Document, *, line: LaunchCommand | None = None, num_nodes: int | None = None
) -> FsdpWords | None:
    """Return the settings of FSDP in a file of `accelerate config`; None if it runs another engine.

    Args:
        file: the file.
        line: of `accelerate launch`, whose flags choose the engine and the version in place of the file.
        num_nodes: of a flag, which overrides the file's.
    """
    flags = () if line is None else line.flags
    uses = None if line is None else said_by(line, "use_fsdp")
    if uses is None and any(flag.name in _OTHER_ENGINES for flag in flags):
        return None
    uses = uses or file.said("distributed_type")
    section, version = file.value(_SECTION), None if line is None else said_by(line, "fsdp_version")
    if uses is None or uses.value not in ("FSDP", None):  # a switch has no value
        return None
    keys = section if isinstance(section, dict) else {}
    said = {key.removeprefix("fsdp_"): file.said(_SECTION, key) for key in keys}
    said |= {"version": version} if version is not None else {}
    for name in ("dp_replicate_size", "cp_size"):
        said[name] = file.said(_PARALLELISM, f"{_PARALLELISM}_{name}")
    return FsdpWords(
        uses=uses,
        keys={name: key for name, key in said.items() if key is not None and key.value is not None},
        num_nodes=num_nodes or _whole(file.value("num_machines")),
    )


def words_of_trainer(
    fsdp: Said[Any], config: Mapping[str, Said[Any]], *, transformers: str | None, num_nodes: int = 1
) -> FsdpWords | None:
    """Return the settings of FSDP in TrainingArguments; None if they turn it off.

    Source: transformers/training_args.py, _process_fsdp_args (5.0, 5.9, 5.10 and 5.23).

    Args:
        fsdp: `fsdp`: a switch, or words of version 1.
        config: `fsdp_config`, by key.
        transformers: the installed release; None for the newest known one.
        num_nodes: of the run.

    Raises:
        UserError: transformers refuses a word.
    """
    is_new = transformers is None or release_of(transformers) >= release_of("5.10")
    items = _items(fsdp)
    if not items:
        return None
    keys = {name.removeprefix("fsdp_"): key for name, key in config.items() if key.value is not None}
    notes: tuple[str, ...] = ()
    if (offload := keys.pop("activation_checkpointing_offload", None)) is not None:
        notes = (
            f"activation_checkpointing_offload ({offload.where}) has no effect, as Trainer does not pass it "
            "on: --offload-activations does the same",
        )
    version = number_of(keys["version"], (1, 2)) if "version" in keys else (2 if is_new else 1)
    for item in items:
        if item.upper() in STRATEGIES:
            name = "sharding_strategy" if version == 1 else "reshard_after_forward"
            keys.setdefault(name, replace(fsdp, value=_strategy_of_trainer(fsdp, item, version=version)))
        elif item == "offload":
            keys.setdefault("cpu_offload", replace(fsdp, value=True))
        elif item == "auto_wrap":
            keys.setdefault("auto_wrap_policy", replace(fsdp, value=BLOCKS))
        else:
            words = ", ".join([*map(str.lower, STRATEGIES), "offload", "auto_wrap"])
            raise refused(fsdp, why=f"its words are {words}", fix="write True, and the rest in fsdp_config")
    if not is_new and version == 2:
        keys.setdefault("reshard_after_forward", replace(fsdp, value=False))
    return FsdpWords(
        uses=fsdp,
        keys=keys,
        default_version=version,
        default_policy=BLOCKS if is_new else "NO_WRAP",
        num_nodes=num_nodes,
        default_state_dict={1: _WHOLE, 2: _WHOLE if is_new else "SHARDED_STATE_DICT"},
        notes=notes,
    )


def _items(fsdp: Said[Any]) -> list[str]:
    """Return the words of Trainer's `fsdp`; "full_shard" for a switch that is on."""
    value = fsdp.value
    if isinstance(value, str) and value.lower() in FALSE:
        return []
    if value is None and fsdp.place is not None:  # a keyword's; on the command line it is a switch
        return []
    if value is None or value is True or (isinstance(value, str) and value.lower() in TRUE):
        return ["full_shard"]
    return value.split() if isinstance(value, str) else [str(item) for item in value or ()]


def _strategy_of_trainer(fsdp: Said[Any], item: str, *, version: int) -> str | bool:
    if version == 1:
        return item
    if item.upper() not in ("FULL_SHARD", "SHARD_GRAD_OP"):
        fix = "write fsdp=True, and dp_replicate_size by accelerate's parallelism_config"
        raise refused(fsdp, why=f"transformers has {item} for version 1 alone", fix=fix)
    return item == "full_shard"


def words_of_script(
    situation: Situation,
    *,
    transformers: str | None,
    num_nodes: int = 1,
    read: Callable[[str], bytes],
) -> FsdpWords | None:
    """Return the settings of FSDP in the TrainingArguments of a script; None if it turns FSDP off.

    Args:
        situation: the script and its arguments.
        transformers: as in words_of_trainer.
        num_nodes: of the run.
        read: returns the content of a file, or raises OSError.

    Raises:
        UserError: fsdp_config names a file that can't be read, or transformers refuses a setting.
    """
    trainer, script = situation.trainer, situation.script
    fsdp = None if trainer is None else trainer.find("fsdp")
    if trainer is None or fsdp is None:
        return None
    config: dict[str, Said[Any]] = {}
    for keyword in () if script is None else script.training_arguments:
        name, _, key = keyword.name.partition(".")
        if name == _SECTION and key:
            config[key] = keyword.said
    said = trainer.find(_SECTION)
    if said is not None and isinstance(said.value, dict):
        config |= {name: replace(said, value=value) for name, value in said.value.items()}
    elif said is not None and isinstance(said.value, str):
        config |= _config_file(said, read)
    return words_of_trainer(fsdp, config, transformers=transformers, num_nodes=num_nodes)


def _config_file(said: Said[Any], read: Callable[[str], bytes]) -> dict[str, Said[Any]]:
    """Return the settings in Trainer's file of fsdp_config, or in JSON text on the command line."""
    is_text = said.value.lstrip().startswith("{")
    name = said.text.split()[0] if is_text else said.value
    try:
        text = said.value if is_text else decode(read(name))
        document = read_document(text, name=name, format=Format.JSON)
    except (OSError, Unreadable) as error:
        raise UserError(
            "fsdp-config-unreadable",
            "the file of fsdp_config can't be read",
            found=f"{said.text}: {getattr(error, 'strerror', None) or error}",
            why="Trainer reads FSDP's settings from it",
            fix="name a JSON file that is there",
        ) from None
    keys = [entry.key for entry in document.root.entries] if isinstance(document.root, Entries) else []
    found = {key: document.said(key) for key in keys}
    return {key: replace(value, place=None) if is_text else value for key, value in found.items() if value}


def number_of(key: Said[Any], values: tuple[int, ...]) -> int:
    """Return a number.

    Raises:
        UserError: it is none of the values.
    """
    if str(key.value) not in map(str, values):
        raise refused(key, why=f"it is {' or '.join(map(str, values))}", fix=f"write {values[-1]}")
    return int(key.value)


def refused(key: Said[Any], *, why: str, fix: str) -> UserError:
    """Return the error for a setting that accelerate or transformers refuses."""
    return UserError(
        "fsdp-value-refused",
        "accelerate refuses a setting of FSDP",
        found=f"{key.text}   ({key.place})" if key.place else key.text,
        why=why,
        fix=fix,
    )
