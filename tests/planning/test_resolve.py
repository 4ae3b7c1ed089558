"""resolve: what a user says means the same to every verb; each setting keeps its place."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

import zerofit
from zerofit.checking.inputs.accelerate import launch_of, launch_value
from zerofit.checking.inputs.situations import situations
from zerofit.checking.launch_line import read_line
from zerofit.checking.read_targets import read_targets
from zerofit.checking.situation import Situation
from zerofit.cli import config as config_cli
from zerofit.cli import plan as plan_cli
from zerofit.cli.main import zerofit as group
from zerofit.configs.schemas.catalog import load_schemas
from zerofit.core.command import RANK_FOR_EACH_GPU
from zerofit.core.errors import UserError
from zerofit.core.overrides import Overrides, flag_of
from zerofit.core.plan import Topology
from zerofit.core.setting import Said
from zerofit.core.strategy import Engine, Precision
from zerofit.launching import launch as launch_file
from zerofit.launching import tune as tune_file
from zerofit.launching.clusters import submit as submit_file
from zerofit.planning import plan as plan_file
from zerofit.planning.resolve import Verb, resolve
from zerofit.planning.run_spec import RunSpec

_FLAGS: tuple[tuple[str, ...], ...] = (
    *(("--zero-stage", stage) for stage in "0123"),
    ("--engine", "native"),
    ("--use-deepspeed",),
    ("--offload-optimizer", "cpu"),
    ("--offload-param-device", "cpu"),
    ("--nvme-path", "/disk"),
    *(("--mixed-precision", word) for word in ("no", "fp16", "bf16")),
    ("--micro-batch-size", "2"),
    ("--gradient-accumulation-steps", "2"),
    ("--gradient-clipping", "0.5"),
    ("--gradient-checkpointing",),
    ("--no-gradient-checkpointing",),
    ("--checkpoint-every", "2"),
    ("--offload-activations",),
    ("--optimizer", "adamw-8bit"),
    ("--compile",),
    ("--freeze", "embeddings"),
    ("--lora", "--lora-rank", "4"),
    ("--qlora",),
    ("--no-tf32",),
    ("--global-batch-size", "64"),
    ("--num-processes", "4"),
    ("--nproc-per-node", "2"),
    ("--tp-size", "2"),
    ("--sequence_parallel_size", "2"),
)
_ACCELERATE = (
    "mixed_precision: bf16\nnum_processes: 4\n",
    "distributed_type: MULTI_GPU\nnum_machines: 2\nmachine_rank: 1\n"
    "main_process_ip: node0\nnum_processes: 8\n",
    "distributed_type: DEEPSPEED\nmixed_precision: fp16\ndeepspeed_config:\n  zero_stage: 3\n"
    "  offload_optimizer_device: cpu\n  gradient_clipping: 1.0\n  gradient_accumulation_steps: 4\n",
    "distributed_type: DEEPSPEED\nnum_processes: 8\ndeepspeed_config:\n  deepspeed_config_file: ds-0.json\n",
    "use_cpu: true\nnum_processes: 2\n",
    "distributed_type: DEEPSPEED\nuse_cpu: true\nnum_processes: 2\ndeepspeed_config:\n  zero_stage: 1\n",
)
_DEEPSPEED: tuple[dict[str, Any], ...] = (
    {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}, "bf16": {"enabled": True}},
    {"zero_optimization": {"stage": 2}, "fp16": {"enabled": "auto"}, "gradient_clipping": "auto"},
    {
        "zero_optimization": {"stage": 1},
        "gradient_accumulation_steps": 2,
        "tensor_parallel": {"autotp_size": 2},
    },
)
_LINES: tuple[tuple[str, ...], ...] = (
    (),
    ("accelerate", "launch"),
    ("accelerate", "launch", "--multi_gpu", "--num_processes", "4"),
    ("accelerate", "launch", "--use_deepspeed", "--zero_stage", "3", "--offload_optimizer_device", "cpu"),
    ("accelerate", "launch", "--use_deepspeed", "--zero_stage=2", "--gradient_clipping", "1.0"),
    ("accelerate", "launch", "--mixed_precision", "bf16", "--gradient_accumulation_steps", "2"),
    ("torchrun", "--nproc_per_node", "4"),
    ("torchrun", "--nproc_per_node", "2", "--nnodes", "2", "--node_rank", "0", "--master_addr", "node0"),
    ("deepspeed", "--num_gpus", "2"),
    ("accelerate", "launch", "--cpu", "--num_processes", "2"),
    ("accelerate", "launch", "--use_deepspeed", "--zero_stage", "1", "--mixed_precision", "fp16"),
    ("python",),
)
_VERBS: dict[Verb, tuple[str, ...]] = {
    Verb.PLAN: ("plan",),
    Verb.LAUNCH: ("launch", "--dry-run"),
    Verb.TUNE: ("tune", "--dry-run"),
    Verb.SUBMIT: ("submit", "--on", "slurm", "--dry-run"),
}


_each_number = pytest.mark.parametrize("num_lines", [30, pytest.param(200, marks=pytest.mark.slow)])
"""Of drawn lines."""
_UNDERSCORED = {
    "--config-file": "--config_file",
    "--deepspeed-config-file": "--deepspeed_config_file",
}


class _Resolved(Exception):  # noqa: N818 - it ends a verb where the spec is made
    def __init__(self, spec: RunSpec) -> None:
        self.spec = spec


@pytest.fixture
def resolved(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Return a function that returns the spec that a command line of zerofit makes, or its error."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "none"))
    (tmp_path / "train.py").write_text("")
    for number, text in enumerate(_ACCELERATE):
        (tmp_path / f"acc-{number}.yaml").write_text(text)
    for number, document in enumerate(_DEEPSPEED):
        (tmp_path / f"ds-{number}.json").write_text(json.dumps(document, indent=2))

    def stop(*target: Any, **settings: Any) -> RunSpec:
        raise _Resolved(resolve(*target, **settings))

    for module in (plan_cli, config_cli, plan_file, launch_file, tune_file, submit_file):
        monkeypatch.setattr(module, "resolve", stop)
    for check in ("check_client", "check_libraries"):
        monkeypatch.setattr(submit_file, check, lambda _: None)
    monkeypatch.setattr(submit_file.slurm, "check", lambda _: None)

    def run(*words: str) -> RunSpec | str:
        try:
            group.main(args=list(words), prog_name="zerofit", standalone_mode=False, obj={"debug": False})
        except _Resolved as ended:
            return ended.spec
        except UserError as error:
            return error.rule
        raise AssertionError(f"{words} made no spec")

    return run


def _lines(num_lines: int) -> Iterator[tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]]:
    """Yield zerofit's own flags, the flags that name files, and a launcher's line."""
    draw = Random(20261129)
    files = (
        *(("--config-file", f"acc-{number}.yaml") for number in range(len(_ACCELERATE))),
        *(("--deepspeed-config-file", f"ds-{number}.json") for number in range(len(_DEEPSPEED))),
        (),
        (),
    )
    for _ in range(num_lines):
        flags = tuple(word for chosen in draw.sample(_FLAGS, draw.choice((0, 1, 2, 3))) for word in chosen)
        named, line = draw.choice(files), draw.choice(_LINES)
        if named and line[:2] == ("accelerate", "launch") and draw.random() < 0.5:
            line, named = (*line, *(_UNDERSCORED.get(word, word) for word in named)), ()
        yield flags, named, line


def _said(spec: RunSpec) -> dict[str, tuple[Any, str]]:
    """Return the value and the place of all that was said, in files or not."""
    both = spec.overrides if spec.files is None else spec.overrides.over(spec.files.overrides)
    return {name: (said.value, said.where) for name, said in both.said.items()}


def _told(found: RunSpec | str) -> Any:
    """Return what was said, or the error."""
    return found if isinstance(found, str) else _said(found)


@_each_number
def test_a_line_means_the_same_to_all_verbs(resolved: Any, num_lines: int) -> None:
    differing = []
    for flags, named, line in _lines(num_lines):
        target = (*named, *line, "train.py", "--lr", "1")
        found = {verb: resolved(*words, *flags, *target) for verb, words in _VERBS.items()}
        made = [spec for spec in found.values() if isinstance(spec, RunSpec)]
        told = [_told(spec) for spec in found.values()]
        others = [
            {name: getattr(spec.nodes, name) for name in ("num_nodes", "num_processes", "ranks_per_node")}
            for spec in made
        ]
        targets = [spec.target for spec in made]
        on_cpu = [
            spec.on_cpu for verb, spec in found.items() if isinstance(spec, RunSpec) and verb is not Verb.PLAN
        ]
        compared = (told, others, targets, on_cpu)
        same = all(rest == values[0] for values in compared for rest in values[1:])
        if not same:
            differing.append((" ".join((*flags, *target)), told, others, targets))
    assert not differing, differing[0]


@pytest.mark.parametrize(
    ("line", "left_out"),
    [
        ("--use_deepspeed --zero_stage 3 --deepspeed_config_file ds-1.json", {"zero_stage"}),
        ("--use_deepspeed --gradient_clipping 1.0 --deepspeed_config_file ds-1.json", set()),
        ("--use_deepspeed --gradient_clipping 1.0 --deepspeed_config_file ds-0.json", {"gradient_clipping"}),
        ("--mixed_precision fp16 --config_file acc-3.yaml", {"precision"}),
        ("--mixed_precision fp16 --use_deepspeed --deepspeed_config_file ds-1.json", set()),
        ("--gradient_accumulation_steps 2", {"gradient_accumulation_steps"}),
        ("--multi_gpu --zero_stage 3 --config_file acc-2.yaml", {"zero_stage"}),
        ("--config_file acc-1.yaml --offload_optimizer_device cpu", {"optimizer_offload"}),
        ("--cpu --deepspeed_config_file ds-0.json", {"deepspeed_file"}),
        ("--config_file acc-2.yaml --zero_stage 2", set()),
        (
            "--use_deepspeed --offload_param_nvme_path /disk --deepspeed_config_file ds-0.json",
            {"nvme_path"},
        ),
    ],
)
def test_flags_that_accelerate_ignores_are_left_out(
    resolved: Any, line: str, left_out: set[str], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("accelerate", "launch", *line.split(), "train.py")
    spec = resolved("launch", "--dry-run", *words)
    kept = {flag.name for flag in spec.typed.flags} | set(spec.overrides.said)
    of_line = read_line(words)
    assert of_line is not None
    in_file = {name for name, said in spec.overrides.said.items() if said.place is not None}
    assert left_out <= set(of_line.names)
    assert (kept - in_file) & set(of_line.names) == set(of_line.names) - left_out
    assert ("accelerate launch ignores" in capsys.readouterr().err) == bool(left_out)


def _hostfile(folder: Path) -> str:
    file = folder / "hosts"
    file.write_text(f"{socket.gethostname()} slots=4\nother slots=4\n")
    return str(file)


def test_ranks_and_nodes_keep_their_place(resolved: Any, tmp_path: Path) -> None:
    hosts = _hostfile(tmp_path)
    for words, world_size, num_nodes in (
        (("--hostfile", hosts), (8, hosts), (2, hosts)),
        (("--hostfile", hosts, "--nproc-per-node", "2"), (4, "--nproc-per-node"), (2, hosts)),
        (("--hostfile", hosts, "--nproc-per-node", "gpu"), None, (2, hosts)),
        (
            ("--nproc-per-node", "gpu", "--num-processes", "4", "--nnodes", "1"),
            (4, "--num-processes"),
            (1, "--num-machines"),
        ),
        (("--config-file", "acc-1.yaml"), (8, "acc-1.yaml:5"), (2, "acc-1.yaml:2")),
        (
            ("--config-file", "acc-1.yaml", "--nproc-per-node", "2"),
            (4, "--nproc-per-node"),
            (2, "acc-1.yaml:2"),
        ),
    ):
        spec = resolved("launch", "--dry-run", *words, "train.py")
        assert (_said(spec).get("world_size"), _said(spec)["num_nodes"]) == (world_size, num_nodes), words
        if world_size is None:
            assert spec.nodes.ranks_per_node == RANK_FOR_EACH_GPU


def test_what_a_line_leaves_to_a_verb_can_be_typed_again(resolved: Any, tmp_path: Path) -> None:
    line = ("deepspeed", "--hostfile", _hostfile(tmp_path), "--num_gpus", "2", "train.py")
    assert str(resolved("plan", *line).typed) == "zerofit plan --num-gpus 2 train.py"
    assert "--hostfile" in str(resolved("launch", "--dry-run", *line).typed)


def test_accelerates_default_file_is_for_this_machine(
    resolved: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    (tmp_path / "home" / "accelerate").mkdir(parents=True)
    (tmp_path / "home" / "accelerate" / "default_config.yaml").write_text("num_processes: 2\n")
    for words, is_read in (
        (("plan", "train.py"), True),
        (("launch", "--dry-run", "train.py"), True),
        (("tune", "--dry-run", "--deepspeed", "ds-0.json", "train.py"), True),
        (("plan", "--gpus", "8xH100", "train.py"), False),
        (("plan", "--gpus", "8xH100", "--deepspeed", "ds-0.json", "train.py"), False),
        (("plan", "--gpus", "8xH100", "--gpus", "1x4090", "train.py"), False),
        (("submit", "--on", "slurm", "--gpus", "8xH100", "--deepspeed", "ds-0.json", "train.py"), False),
        (("config", "--from", "ds-0.json"), False),
    ):
        assert ("world_size" in _said(resolved(*words))) == is_read, words


@_each_number
def test_a_file_says_the_same_to_config_as_to_plan(resolved: Any, num_lines: int) -> None:
    for number, (flags, _, _) in enumerate(_lines(num_lines)):
        file = (
            f"acc-{number % len(_ACCELERATE)}.yaml" if number % 2 else f"ds-{number % len(_DEEPSPEED)}.json"
        )
        own = tuple(word for word in flags if word not in ("--nproc-per-node", "--use-deepspeed"))
        if len(own) != len(flags):
            continue  # config has no flags of other launchers
        named = ("--config-file", file) if file.endswith("yaml") else ("--deepspeed", file)
        of_config = resolved("config", "--from", file, *flags)
        of_plan = resolved("plan", *flags, *named, "train.py")
        assert _told(of_config) == _told(of_plan), (flags, file)


def test_python_says_the_same_as_the_command_line(resolved: Any) -> None:
    for settings, words in (
        ({"zero_stage": 3, "precision": "bf16"}, ("--zero-stage", "3", "--mixed-precision", "bf16")),
        (
            {"config_file": "acc-2.yaml", "zero_stage": 1},
            ("--config-file", "acc-2.yaml", "--zero-stage", "1"),
        ),
        ({"num_processes": 4, "gpus": "8xH100"}, ("--num-processes", "4", "--gpus", "8xH100")),
    ):
        of_line = resolved("plan", *words, "train.py")
        with pytest.raises(_Resolved) as caught:
            zerofit.plan("train.py", **settings)
        assert _said(caught.value.spec) == _said(of_line)
    with pytest.raises(_Resolved) as caught:
        zerofit.plan("accelerate", "launch", "--mixed_precision", "fp16", "train.py", mixed_precision="bf16")
    assert _said(caught.value.spec)["precision"] == (Precision.BF16, "--mixed-precision")
    with pytest.raises(_Resolved) as caught:
        zerofit.plan("accelerate", "launch", "--config_file", "acc-3.yaml", "train.py")
    assert caught.value.spec.target == ("train.py",)
    assert _said(caught.value.spec)["zero_stage"][1].startswith("ds-0.json:")


def test_the_variables_of_a_line_end_with_the_call(resolved: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str | None] = []
    resolve_then = plan_file.resolve

    def looks(*args: Any, **kwargs: Any) -> RunSpec:
        try:
            return resolve_then(*args, **kwargs)
        finally:
            seen.append(os.environ.get("OWN_DATA"))

    monkeypatch.setattr(plan_file, "resolve", looks)
    monkeypatch.delenv("OWN_DATA", raising=False)
    before = dict(os.environ)
    with pytest.raises(_Resolved):
        zerofit.plan("OWN_DATA=/data", "accelerate", "launch", "train.py")
    assert seen == ["/data"]
    assert dict(os.environ) == before


_CHECKED = ("engine", "zero_stage", "optimizer_offload", "param_offload", "precision")
"""The settings that check knows from flags and files alike."""
_NUMBERS = ("gradient_accumulation_steps", "gradient_clipping")
_OF_FLAGS = (
    *_NUMBERS,
    "micro_batch_size",
    "gradient_checkpointing",
    "optimizer",
    "nvme_path",
)
"""Those that it knows from zerofit's flags; in files its rules look them up, with the place of each.

It has no use for checkpoint_every, attention, compile, freeze, lora, quantization, tf32, liger,
group_by_length, global_batch_size and the sizes of parallel groups: no rule on files and lines is about them.
"""
_WITHOUT_SETTING = (None, "none", "fp32", "native", 0)
"""Values in check's view that nobody sets: what runs then, where the other verbs have no setting."""


def _situations(words: tuple[str, ...]) -> tuple[Situation, ...]:
    return situations(read_targets(words, schemas=load_schemas(), stdin=bytes))


def _where(name: str, said: Said[Any]) -> str:
    """Return the place of a setting, where a flag in any spelling is the field's flag."""
    return flag_of(name) if said.place is None and said.text.startswith("--") else said.where


def _in_check(situation: Situation) -> dict[str, tuple[Any, str]]:
    settings = situation.settings
    said = {name: found for name in _CHECKED if (found := getattr(settings, name)) is not None}
    said |= {name: settings.fields[name] for name in _OF_FLAGS if name in settings.fields}
    set_ = {name: found for name, found in said.items() if found.value not in _WITHOUT_SETTING}
    return {name: (found.value, _where(name, found)) for name, found in set_.items()}


def _in_spec(overrides: Overrides, of_files: tuple[str, ...] = ()) -> dict[str, tuple[Any, str]]:
    wanted = {name: said for name, said in overrides.said.items() if name in (*_CHECKED, *_OF_FLAGS)}
    return {
        name: (said.value, _where(name, said))
        for name, said in wanted.items()
        if said.value not in _WITHOUT_SETTING and (said.place is None or name in (*_CHECKED, *of_files))
    }


def _numbers_of(situation: Situation, said: Overrides) -> dict[str, tuple[Any, str]]:
    """Return accumulation and clipping as the rules look them up: the file's, but for "auto"."""
    layers, found = launch_of(situation), {}
    engine = situation.settings.engine
    for name in _NUMBERS if engine is None or engine.value is Engine.DEEPSPEED else ():
        of_file = situation.file.said(name)
        of_launch = launch_value(layers, name) if not situation.deepspeed or of_file else None
        value = of_launch if of_file is None or of_file.value == "auto" else of_file
        if value is not None:
            found[name] = (type(said.get(name))(value.value), _where(name, value))
    return found


def _ranks(found: Topology | None, *, on_cpu: bool, spec: RunSpec) -> tuple[Any, Any]:
    """Return the ranks of check and of a verb; nothing if they are not known."""
    world_size, num_nodes = spec.overrides.get("world_size"), spec.overrides.get("num_nodes") or 1
    in_spec = None if world_size is None else (num_nodes, world_size, on_cpu)
    return None if found is None else (found.num_nodes, found.world_size, found.on_cpu), in_spec


@_each_number
def test_check_of_a_launch_by_zerofit_means_what_launch_does(resolved: Any, num_lines: int) -> None:
    differing = []
    for flags, named, line in _lines(num_lines):
        words = (*flags, *named, *line, "train.py", "--lr", "1")
        spec = resolved("launch", "--dry-run", *words)
        if isinstance(spec, str):
            continue
        situation = _situations(("zerofit", "launch", *words))[0]
        pairs = (
            (_in_check(situation), _in_spec(spec.overrides)),
            _ranks(situation.topology, on_cpu=spec.on_cpu, spec=spec),
        )
        if any(found != expected for found, expected in pairs):
            differing.append((" ".join(words), *pairs))
    assert not differing, (len(differing), differing[0])


@_each_number
def test_check_of_a_launch_line_means_what_the_other_verbs_say(resolved: Any, num_lines: int) -> None:
    differing = []
    for _, named, line in _lines(num_lines):
        if line[:2] != ("accelerate", "launch"):
            continue
        words = (*line, *(_UNDERSCORED.get(word, word) for word in named), "train.py", "--lr", "1")
        spec = resolved("launch", "--dry-run", *words)
        both = spec.overrides if spec.files is None else spec.overrides.over(spec.files.overrides)
        situation = _situations(words)[0]
        found, expected = _in_check(situation), _in_spec(both, _NUMBERS)
        found |= _numbers_of(situation, both)
        pairs = ((found, expected), _ranks(situation.topology, on_cpu=spec.on_cpu, spec=spec))
        if any(found != expected for found, expected in pairs):
            differing.append((" ".join(words), *pairs))
    assert not differing, (len(differing), differing[0])


@pytest.mark.parametrize(
    ("words", "field", "where", "beaten"),
    [
        (("--zero-stage", "2"), "zero_stage", "--zero-stage", "ds-0.json:3"),
        ((), "precision", "ds-0.json:9", None),
        (("--mixed-precision", "fp16"), "precision", "--mixed-precision", "ds-0.json:9"),
        (("--qlora",), "quantization", "--qlora", None),
        (("--checkpoint-every", "2"), "gradient_checkpointing", "--checkpoint-every", None),
        (("--offload-activations",), "gradient_checkpointing", "--offload-activations", None),
        (("--offload-activations",), "activation_offload", "--offload-activations", None),
        (("--no-tf32",), "tf32", "--no-tf32", None),
    ],
)
def test_a_setting_keeps_its_place_and_what_it_overrides(
    resolved: Any, words: tuple[str, ...], field: str, where: str, beaten: str | None
) -> None:
    spec = resolved("plan", *words, "--deepspeed", "ds-0.json", "train.py")
    overridden = spec.overrides.beaten.get(field)
    assert spec.overrides.where(field) == where
    assert (None if overridden is None else overridden.where) == beaten
