"""Rules on launch commands: flags and values that are refused, and flags without effect."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zerofit.checking.inputs.accelerate import (
    IN_DEEPSPEED_FILE,
    fills_in,
    launch_of,
    launch_of_deepspeed,
    named_deepspeed_file,
    uses_deepspeed,
)
from zerofit.checking.inputs.launcher_flags import TORCH_LAUNCH, flags_of, is_switch
from zerofit.checking.inputs.zerofit_line import flag_name
from zerofit.checking.rule import ACCELERATE, Hit, Rule, Severity, declared, fails, ignored
from zerofit.checking.situation import known
from zerofit.configs.document import say
from zerofit.configs.schema import expected, is_in_range, is_right_type
from zerofit.configs.schemas.releases import fix_for_release
from zerofit.core.command import Launcher, Refusal, Route, is_literal, is_truth
from zerofit.core.errors import nearest
from zerofit.core.overrides import IMPLY_CHECKPOINTING, REMOVED_FLAGS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zerofit.checking.inputs.launcher_flags import LauncherFlags
    from zerofit.checking.situation import Situation
    from zerofit.configs.document import Document
    from zerofit.core.command import Flag, LaunchCommand, RefusedFlag


_LAUNCH = f"{ACCELERATE}/commands/launch.py"
_ONE_OF = ("cpu", "multi_gpu", "tpu", "use_deepspeed", "use_fsdp")
_DEEPSPEED_FLAGS = (*IN_DEEPSPEED_FILE, "deepspeed_config_file", "zero3_init_flag")


@Rule(
    id="launch-unknown-flag",
    severity=Severity.ERROR,
    summary="the launcher does not know a flag",
    why="flags before the script belong to the launcher, which refuses unknown ones",
    fix="remove the flag, or write it after the script if it is the script's",
    see=_LAUNCH,
    evidence=fails("unrecognized arguments: --zero_stag"),
)
def _unknown_flags(situation: Situation) -> Iterator[Hit]:
    is_own = situation.command is not None and situation.command.launcher is Launcher.ZEROFIT
    for refused in _refused(situation, Refusal.UNKNOWN):
        flag = refused.flag
        # After one dash, words may follow without a space.
        if flag is not None and flag.text.startswith("--"):
            flags = _known_flags(situation)
            name = flag.name if flags.key(flag.name) else nearest(flag.name, flags.names)
            near = f"write --{name}" if name else None
            removed = REMOVED_FLAGS.get(f"--{flag.name}") if is_own else None
            fix = removed.fix if removed else fix_for_release(flags.schema, flag.name)
            yield Hit(found=flag.text, fix=fix or _for_script(situation, flag) or near)
    for refused in _refused(situation, Refusal.AMBIGUOUS):
        if (flag := refused.flag) is not None:
            fitting = _known_flags(situation).fitting(flag.name)
            names = " or ".join(f"--{name}" for name in fitting)
            why = "the launcher takes abbreviations, but only of one flag"
            if len(fitting) == 1:
                why = "this Python's argparse takes the two spellings of the flag for two flags"
            yield Hit(found=flag.text, why=why, fix=f"write {names}")
    for refused in _refused(situation, Refusal.OTHER):
        yield Hit(
            found=refused.message,
            why="the launcher's parser also reads the words after the script",
            fix="write the script's flag in full, or -- before the script",
        )


def _for_script(situation: Situation, flag: Flag) -> str | None:
    """Return the fix for a flag that the launcher does not know and TrainingArguments do."""
    schemas, is_loop = situation.schemas, situation.route is Route.ACCELERATE
    key = None if schemas is None or is_loop else schemas.training_arguments.root.find(flag.name)
    return None if key is None else f"write it after the script: {flag.name} is a field of TrainingArguments"


@Rule(
    id="launch-flag-without-value",
    severity=Severity.ERROR,
    summary="a flag of the launcher lacks its value",
    why="the launcher ends with 'expected one argument' before it starts anything",
    fix="write a value after the flag, or remove it",
    see=_LAUNCH,
    evidence=fails("argument --mixed_precision/--mixed-precision: expected one argument"),
)
def _no_value(situation: Situation) -> Iterator[Hit]:
    for refused in _refused(situation, Refusal.NO_VALUE):
        flag = refused.flag
        key = None if flag is None else _known_flags(situation).key(flag.name)
        if flag is not None and key is not None:
            yield Hit(found=flag.text, fix=f"give --{key.name} {expected(key)}, or leave it out")


@Rule(
    id="launch-flag-value",
    severity=Severity.ERROR,
    summary="a flag of the launcher has an invalid value",
    why="the launcher, or DeepSpeed, refuses the value",
    fix="give the flag a valid value",
    see=_LAUNCH,
    evidence=fails("invalid choice: 'bf61'"),
)
def _flag_values(situation: Situation) -> Iterator[Hit]:
    command = situation.command
    if command is None or not command.flags:
        return
    flags = _known_flags(situation)
    wrong = {refused.flag for refused in _refused(situation, Refusal.WRONG_VALUE)}
    for flag in command.flags:
        key = flags.key(flag.name)
        if key is None or flag.value is None or is_switch(key) or not is_literal(flag.value):
            continue
        is_wrong = flag in wrong or not is_right_type(key, flag.value) or not is_in_range(key, flag.value)
        if is_wrong and _is_used(command, flag):
            yield Hit(found=flag.text, fix=f"give --{flag.name} {expected(key)}")
    for refused in _refused(situation, Refusal.NEEDLESS_VALUE):
        if refused.flag is not None:
            why = "it is a switch, and the launcher refuses a value"
            yield Hit(found=refused.flag.text, why=why, fix=f"write --{refused.flag.name} alone")


def _is_used(command: LaunchCommand, flag: Flag) -> bool:
    """Return False for a flag of FSDP in a line that another flag takes to another engine."""
    return not (flag.name.startswith("fsdp_") and command.find("use_deepspeed", "multi_gpu", "cpu"))


@Rule(
    id="launch-without-script",
    severity=Severity.ERROR,
    summary="the launch line starts no script",
    why="the launcher ends with 'the following arguments are required'",
    fix="name the script after the flags",
    see=_LAUNCH,
    evidence=fails(not_reproduced="the harness adds the script"),
)
def _no_script(situation: Situation) -> Iterator[Hit]:
    command = situation.command
    if command is None:
        return
    for _ in _refused(situation, Refusal.NO_SCRIPT):
        taken = next((flag for flag in command.flags if (flag.value or "").endswith(".py")), None)
        if taken is not None:
            fix = f"give --{taken.name} its value before {taken.value}"
            yield Hit(found=taken.text, why=f"--{taken.name} takes {taken.value} as its value", fix=fix)
        else:
            yield Hit(found=" ".join([command.program, *(flag.text for flag in command.flags)]))
    script = command.script or ""
    behind = next((word for word in command.arguments if word.endswith(".py")), None)
    switch = command.flags[-1] if command.flags and command.flags[-1].value is None else None
    if is_truth(script) and behind is not None and switch is not None:
        yield Hit(
            found=f"{switch.text} {script}",
            why=f"--{switch.name} takes no value, so that {script} is taken for the script",
            fix=f"leave out {script}",
        )


def _refused(situation: Situation, why: Refusal) -> tuple[RefusedFlag, ...]:
    """Return what the launcher's parser refuses for one reason."""
    command = situation.command
    return () if command is None else tuple(refused for refused in command.refused if refused.why is why)


def _known_flags(situation: Situation) -> LauncherFlags:
    schemas = known(situation.schemas, "the launcher's flags")
    command = situation.command
    module = TORCH_LAUNCH if command is not None and TORCH_LAUNCH in command.program else None
    return flags_of(Launcher.ACCELERATE if command is None else command.launcher, schemas, module=module)


def _flags(situation: Situation) -> tuple[Flag, ...]:
    command = situation.command
    if command is None or command.launcher is not Launcher.ACCELERATE:
        return ()
    return command.flags


@Rule(
    id="launch-flags-exclude-each-other",
    severity=Severity.ERROR,
    summary="the launcher refuses these flags together",
    why="each of them selects how the run is distributed",
    fix="keep one: --use_deepspeed includes several GPUs",
    see=_LAUNCH,
    evidence=fails("You can only use one of"),
)
def _excluding_flags(situation: Situation) -> Iterator[Hit]:
    chosen = [flag for flag in _flags(situation) if flag.name in _ONE_OF]
    if len({flag.name for flag in chosen}) > 1:
        yield Hit(found=" with ".join(flag.text for flag in chosen))
    command = situation.command
    if command is not None and command.launcher is Launcher.ZEROFIT:
        off = command.find("no_gradient_checkpointing")
        for name, what in IMPLY_CHECKPOINTING.items() if off is not None else ():
            if off is not None and (flag := command.find(flag_name(name))) is not None:
                yield Hit(
                    found=f"{flag.text} with {off.text}",
                    why=f"--{flag.name.replace('_', '-')} {what}",
                    fix="leave one of the two out",
                )
    if command is not None and command.launcher is Launcher.DEEPSPEED:
        names, counts = command.find("include", "exclude"), map(command.find, ("num_gpus", "num_nodes"))
        # A negative number is DeepSpeed's default, as if the flag were not there.
        count = next((flag for flag in counts if flag and not (flag.value or "").startswith("-")), None)
        if names is not None and count is not None:
            yield Hit(
                found=f"{names.text} with {count.text}",
                why="DeepSpeed's launcher takes either the names or the number of GPUs",
                fix=f"keep one: leave out --{count.name}, or --{names.name}",
            )


@Rule(
    id="launch-flags-ignored-beside-deepspeed-file",
    severity=Severity.WARNING,
    summary="accelerate ignores these flags beside a DeepSpeed file",
    why='a flag only fills in "auto" values of the file, and is silently ignored otherwise',
    fix="write the value into the DeepSpeed file, and leave the flag out",
    see=f"{ACCELERATE}/utils/dataclasses.py",
    evidence=ignored(("zero_stage", 2)),
)
def _flags_beside_file(situation: Situation) -> Iterator[Hit]:
    found = launch_of_deepspeed(situation)
    if found is None or found[0].command is None or named_deepspeed_file(found[0]) is None:
        return
    for name, path in IN_DEEPSPEED_FILE.items():
        flag = found[0].command.find(name)
        if flag is not None and is_literal(flag.value):
            file = known(situation.deepspeed, "the DeepSpeed file's content")
            if _is_ignored(file, flag, path):
                key = ".".join(path)
                yield Hit(
                    found=f"{flag.text} with {say(file, *path)} in {file.name}",
                    fix=f"write {key}: {_json(flag.value)} in {file.name}, without the flag",
                )


def _is_ignored(file: Document, flag: Flag, path: tuple[str, ...]) -> bool:
    """Return True if the file has another value, or none; only "auto" takes over the flag's value."""
    entry = file.at(*path)
    value = flag.value or ""
    if entry is None:
        does_nothing = value.lower() in ("none", "false")
        only_at_3 = flag.name == "zero3_save_16bit_model"
        return not does_nothing and not (only_at_3 and file.value("zero_optimization", "stage") != 3)
    if entry.plain == "auto":
        return not fills_in(file, flag.name)
    return not _is_same(entry.plain, value)


def _is_same(value: Any, text: str) -> bool:
    try:
        return not isinstance(value, bool) and float(value) == float(text)
    except (TypeError, ValueError, OverflowError):
        return str(value).lower() == text.lower()


def _json(text: str | None) -> str:
    try:
        float(text or "")
    except ValueError:
        return text.lower() if text and text.lower() in ("true", "false") else f'"{text}"'
    return text or ""


@Rule(
    id="launch-flags-without-deepspeed",
    severity=Severity.ERROR,
    summary="DeepSpeed's flags have no effect without DeepSpeed",
    why="accelerate only uses DeepSpeed for --use_deepspeed or for its file's distributed_type",
    fix="add --use_deepspeed, or write distributed_type: DEEPSPEED",
    see=_LAUNCH,
    evidence=ignored(("zero_stage", None)),
)
def _flags_without_deepspeed(situation: Situation) -> Iterator[Hit]:
    launch = launch_of(situation)
    if launch is None or launch.command is None:
        return
    flags = [flag for flag in launch.command.flags if flag.name in _DEEPSPEED_FLAGS]
    deepspeed = uses_deepspeed(launch)
    if flags and deepspeed is not None and not deepspeed.value:
        yield Hit(
            found=f"{' '.join(flag.text for flag in flags)} with {deepspeed.text}",
            confidence=deepspeed.confidence,
        )


@Rule(
    id="cpu-flag-skips-deepspeed",
    severity=Severity.WARNING,
    summary="accelerate launch --cpu runs the script without DeepSpeed",
    why="with --cpu the launcher starts one process, whatever the file says",
    fix="test with `zerofit launch --cpu`, or leave --cpu out",
    see=_LAUNCH,
    evidence=ignored(("zero_stage", None)),
)
def _cpu_flag_with_deepspeed(situation: Situation) -> Iterator[Hit]:
    launch = launch_of(situation)
    if launch is None or launch.command is None or launch.file is None:
        return
    flag = launch.command.find("cpu")
    if flag is not None and launch.file.value("distributed_type") == "DEEPSPEED":
        yield Hit(found=f"{flag.text} with {say(launch.file, 'distributed_type')}")


ON_LINES = (_no_script, _no_value, _flag_values, _excluding_flags)
"""Rules on lines that their launcher refuses, so that no verb runs them."""
ON_UNKNOWN_FLAGS = (_unknown_flags,)
"""The rule on flags that the launcher does not know; other verbs take some of other releases."""
RULES = declared(vars())
