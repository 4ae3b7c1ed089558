"""Commands, parsed into launcher, flags, script and arguments."""

from __future__ import annotations

import shlex

import pytest

from zerofit.checking.inputs.command_line import read_command
from zerofit.checking.inputs.launcher_flags import LauncherFlags, flags_of
from zerofit.checking.inputs.zerofit_line import settings_of_zerofit
from zerofit.configs.schemas.catalog import load_schemas
from zerofit.core.command import Flag, LaunchCommand, Launcher

_SCHEMAS = load_schemas()
TORCHRUN, DEEPSPEED = (flags_of(launcher, _SCHEMAS) for launcher in (Launcher.TORCHRUN, Launcher.DEEPSPEED))


def _read(command: str) -> LaunchCommand | None:
    return read_command(shlex.split(command), schemas=_SCHEMAS)


def _told(command: LaunchCommand | None) -> str:
    """Return a command on one line: launcher, flags, script and arguments."""
    assert command is not None
    flags = " ".join(
        flag.name if flag.value is None else f"{flag.name}={flag.value}" for flag in command.flags
    )
    return f"{command.launcher}: {flags} | {command.script} | {' '.join(command.arguments)}"


_COMMANDS = [
    (
        "accelerate launch --num-processes=2 --use_deepspeed --zero_stage 3 train.py --zero_stage 1",
        "accelerate launch: num_processes=2 use_deepspeed zero_stage=3 | train.py | --zero_stage 1",
    ),
    ("accelerate-launch -m my.module --x 1", "accelerate launch: module | my.module | --x 1"),
    ("/opt/bin/accelerate launch -q -t 3 -- train.py a", "accelerate launch: quiet tee=3 | train.py | a"),
    ("python -m accelerate.commands.launch --cpu train.py", "accelerate launch: cpu | train.py | "),
    ("accelerate launch --zero_stag 3 train.py", "accelerate launch: zero_stag=3 | train.py | "),
    ("accelerate launch --fast train.py", "accelerate launch: fast | train.py | "),
    ("accelerate launch --num_processes 2", "accelerate launch: num_processes=2 | None | "),
    (
        "OMP_NUM_THREADS=1 env -u A B=2 nohup torchrun --nproc-per-node 4 --standalone train.py --bf16",
        "torchrun: nproc_per_node=4 standalone | train.py | --bf16",
    ),
    (
        "python3.11 -u -X dev -m torch.distributed.launch --use_env --nnodes 2 -m a.b",
        "torchrun: use_env nnodes=2 module | a.b | ",
    ),
    (
        "deepspeed --num_gpus=2 -i localhost:0,1 --no_local_rank train.py --deepspeed ds.json",
        "deepspeed: num_gpus=2 include=localhost:0,1 no_local_rank | train.py | --deepspeed ds.json",
    ),
    ("python -W ignore train.py --x", "python:  | train.py | --x"),
    ("python -m my.training --x", "python:  | my.training | --x"),
    (
        "zerofit launch --nnodes 2 --cpu --offload-param-device cpu train.py",
        "zerofit launch: num_machines=2 cpu offload_param=cpu | train.py | ",
    ),
    ("python -m zerofit launch --dry-run train.py", "zerofit launch: dry_run | train.py | "),
    (
        "srun --ntasks 4 accelerate launch --machine_rank 0 train.py",
        "accelerate launch: machine_rank=0 | train.py | ",
    ),
    ("uv run python train.py", "python:  | train.py | "),
    (
        "accelerate launch --monitor_interval -1 train.py",
        "accelerate launch: monitor_interval=-1 | train.py | ",
    ),
]


@pytest.mark.parametrize(("command", "expected"), _COMMANDS)
def test_a_command_is_taken_apart(command: str, expected: str) -> None:
    assert _told(_read(command)) == expected


@pytest.mark.parametrize(
    "command", ["", "ls -l", "python", "python -c 'print(1)'", "accelerate config", "A=1", "env", "srun ls"]
)
def test_what_starts_no_script_is_none(command: str) -> None:
    assert _read(command) is None


def test_a_flag_keeps_the_words_of_its_user() -> None:
    command = _read("accelerate launch --zero-stage 2 --zero_stage=3 train.py")
    assert command is not None
    assert command.flags == (
        Flag(name="zero_stage", value="2", text="--zero-stage 2"),
        Flag(name="zero_stage", value="3", text="--zero_stage=3"),
    )
    assert command.find("zero_stage") == command.flags[1]


@pytest.mark.parametrize(
    ("table", "name", "found"),
    [
        (TORCHRUN, "nproc_per_node", "nproc_per_node"),
        (TORCHRUN, "m", "module"),
        (TORCHRUN, "nproc", "nproc_per_node"),
        (TORCHRUN, "log", None),  # --log_dir or --logs_specs
        (TORCHRUN, "nproc_pre_node", None),
        (DEEPSPEED, "num_acc", "num_gpus"),
        (DEEPSPEED, "num", None),
        (DEEPSPEED, "a", None),
    ],
)
def test_a_name_is_a_flag_or_the_beginning_of_one(table: LauncherFlags, name: str, found: str | None) -> None:
    assert table.find(name) == found


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", {}),
        (
            "--zero_stage 3 --offload-param cpu",
            {"zero_stage": (3, "--zero_stage 3"), "param_offload": ("cpu", "--offload-param cpu")},
        ),
        ("--zero-stage many --engine fast", {}),
        (
            "--optimizer adamw_8bit --micro-batch-size=4",
            {
                "optimizer": ("adamw-8bit", "--optimizer adamw_8bit"),
                "micro_batch_size": (4, "--micro-batch-size=4"),
            },
        ),
        (
            "--offload-activations",
            {
                "gradient_checkpointing": (True, "--offload-activations"),
                "activation_offload": (True, "--offload-activations"),
            },
        ),
        (
            "--no-gradient-checkpointing",
            {"gradient_checkpointing": (False, "--no-gradient-checkpointing")},
        ),
    ],
)
def test_settings_of_a_launch_by_zerofit_are_those_of_its_flags(
    flags: str, expected: dict[str, tuple[object, str]]
) -> None:
    command = _read(f"zerofit launch {flags} train.py")
    assert command is not None
    settings = settings_of_zerofit(command)
    assert {name: (said.value, said.text) for name, said in settings.fields.items()} == expected
    assert settings.zero_stage == settings.fields.get("zero_stage")
