"""plan SCRIPT and check --capture on a capture made by hand, and the verbs on a script that really runs."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from captures import LOOP, with_model
from runs import RunZerofit

from zerofit.cli import check as check_module
from zerofit.cli import plan as plan_module
from zerofit.core.capture import Capture, for_plan
from zerofit.core.errors import UserError
from zerofit.core.plan import plan_from_json
from zerofit.planning import plan as planning_plan
from zerofit.scripts.capture import with_progress

_Run = Callable[..., int]

_GPUS = ("--gpus", "2xA100-40G", "--host-ram", "512G", "--cpu-cores", "32", "--host-bandwidth", "100GB/s")
_SCRIPT = """\
import make
from accelerate import Accelerator

accelerator = Accelerator(gradient_accumulation_steps=make.steps())
model, optimizer = accelerator.prepare(make.model(), make.optimizer())
"""

_CAPTURES = {plan_module: planning_plan, check_module: with_progress}
"""Modules that run the script for a verb, where it is not the verb's own."""


_ZERO_2 = (
    *("--zero-stage", "2", "--micro-batch-size", "4", "--no-gradient-checkpointing"),
    *("--offload-optimizer", "none", "--optimizer", "adamw"),
)
"""Flags that leave nothing to choose, so that a screen by closed forms has a choice."""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, cache_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the current folder, which holds a script that nobody can read much of."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache_folder))
    (tmp_path / "train.py").write_text(_SCRIPT)
    return tmp_path


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> _Run:
    """Return a function that runs a verb in this process, with a capture in place of running the script."""

    def in_process(module: Any, *words: str, capture: Capture = LOOP, is_cached: bool = False) -> int:
        @contextmanager
        def captured(target: tuple[str, ...], **_: Any) -> Iterator[Any]:
            yield SimpleNamespace(capture=replace(capture, target=target), is_cached=is_cached)

        monkeypatch.setattr(_CAPTURES.get(module, module), "captured", captured)
        verb = module.__name__.rpartition(".")[2]
        return int(getattr(module, verb).main(list(words), prog_name="zerofit", standalone_mode=False) or 0)

    return in_process


def test_a_plan_from_a_capture_says_what_was_seen_and_what_changes(
    run: _Run, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--fast", *_GPUS, *_ZERO_2)
    assert run(plan_module, *flags, "train.py", "--lr", "1") == 0
    parts = capsys.readouterr().out.rstrip("\n").split("\n\n")
    own, fits = parts[0].splitlines()
    assert own == "your script as it is: 4.3 to 6.4 GiB of 39.5 GiB on each GPU, fits"
    assert fits.startswith("what fits: ZeRO-2, ")
    assert parts[1] == f"    zerofit launch {' '.join(_ZERO_2)} train.py --lr 1"
    assert [line.split("  ")[0] for line in parts[2].splitlines()[1:]][:2] == ["batch on each rank", "engine"]
    assert "sequence 128, global batch 32" in parts[3]
    assert re.search(r"^> +ZeRO-2.* 4 x 4 ", parts[4], re.MULTILINE)
    assert "train.py trains " not in "".join(parts)
    assert run(plan_module, "--all", *flags, "train.py", "--lr", "1") == 0
    parts = capsys.readouterr().out.rstrip("\n").split("\n\n")
    assert parts[3].startswith("train.py trains GPT2LMHeadModel of gpt2, 124 M parameters\n  loop ")


def test_the_json_document_holds_the_capture_and_the_changes(
    run: _Run, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(plan_module, "--fast", *_GPUS, "--json", *_ZERO_2, "train.py") == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["capture"]["target"], document["capture"]["micro_batch_size"]) == (["train.py"], 8)
    (plan,) = document["plans"]
    (engine,) = (row for row in plan["changes"] if row["what"] == "engine")
    assert engine == {
        "what": "engine",
        "script_says": "DDP",
        "runs": "DeepSpeed ZeRO-2",
        "why": "--zero-stage says so",
    }


def test_several_machines_are_compared_for_one_capture(run: _Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(plan_module, "--all", "--fast", "--gpus", "2xA100-40G", "--gpus", "1xT4", "train.py") == 0
    said = capsys.readouterr()
    assert said.out.count("GPT2LMHeadModel of gpt2") == 1
    assert "2 x NVIDIA A100-SXM4-40GB" in said.out
    assert "1 x Tesla T4" in said.out


def test_a_plan_file_holds_the_capture_without_what_it_took(
    run: _Run, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--fast", *_GPUS, "--output", "p.json", "train.py", "--hub_token", "hf_secret")
    assert run(plan_module, *flags) == 0
    out = capsys.readouterr().out
    launch = 'zerofit launch --plan p.json train.py --hub_token "${HUB_TOKEN:?}"'
    assert f"\n\n    {launch}\n\n" in out
    text = (folder / "p.json").read_text()
    capture = plan_from_json(text, name="p.json").capture
    assert capture == for_plan(replace(LOOP, target=("train.py", "--hub_token", "hf_secret")))
    assert "hf_secret" not in text
    assert (folder / "p.json").stat().st_mode & 0o777 == 0o600
    assert {path.name for path in folder.iterdir()} == {"train.py", "p.json"}
    assert run(plan_module, *flags, capture=replace(LOOP, wall_time_s=99.0, peak_host_bytes=1)) == 0


def test_the_answer_is_printed_before_a_plan_that_differs_is_left_alone(
    run: _Run, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--fast", *_GPUS, "--output", "p.json")
    assert run(plan_module, *flags, "train.py") == 0
    capsys.readouterr()
    with pytest.raises(UserError) as error:
        run(plan_module, *flags, *_ZERO_2, "train.py")
    assert error.value.rule == "file-exists"
    assert "ZeRO-2" in capsys.readouterr().out
    assert run(plan_module, *flags, *_ZERO_2, "--force", "train.py") == 0


@pytest.mark.parametrize("arguments", [("--lr", "1"), ()])
def test_a_file_of_something_else_is_noticed_before_the_script_is_run(
    run: _Run, folder: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> None:
    if arguments:
        assert run(plan_module, "--fast", *_GPUS, "--output", "p.json", "train.py") == 0
        capsys.readouterr()
    else:
        (folder / "p.json").write_text("mine")
    with pytest.raises(UserError) as error:
        run(plan_module, "--fast", *_GPUS, "--output", "p.json", "train.py", *arguments)
    assert (error.value.rule, error.value.found) == ("file-exists", "p.json")
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (plan_module, (*_GPUS, "--model", "gpt2", "--seq-len", "8", "--global-batch", "8")),
        (check_module, ("train.py",)),
    ],
)
def test_a_capture_limit_without_a_capture_is_refused(run: _Run, module: Any, words: tuple[str, ...]) -> None:
    with pytest.raises(UserError) as error:
        run(module, "--capture-limit", "5", *words)
    assert error.value.rule == "capture-limit-without-capture"


@pytest.mark.slow
def test_manual_accumulation_is_reported(run: _Run, capsys: pytest.CaptureFixture[str]) -> None:
    by_hand = replace(LOOP, gradient_accumulation_steps=1, accumulates=False, accumulates_by_hand=4)
    flags = ("--all", "--fast", *_GPUS, "--micro-batch-size", "2")
    assert run(plan_module, *flags, "train.py", capture=by_hand) == 0
    said = capsys.readouterr().out
    assert re.search(r"batch on each rank +8 x 1, stepped every 4\n", said)
    assert re.search(r"batch on each rank +8 x 1, stepped every 4 +2 x 4, stepped every 4 +--micro", said)
    assert run(plan_module, "--fast", *_GPUS, "--json", "train.py", capture=by_hand) == 0
    assert json.loads(capsys.readouterr().out)["capture"]["accumulates_by_hand"] == 4


@pytest.mark.slow
def test_if_nothing_fits_no_changes_are_listed(run: _Run, capsys: pytest.CaptureFixture[str]) -> None:
    huge = replace(LOOP.model.facts, num_parameters=10**14, num_trainable_parameters=10**14)
    capture = with_model(LOOP, facts=huge)
    flags = ("--fast", *_GPUS, "--engine", "native")  # without DeepSpeed there is less to search
    assert run(plan_module, *flags, "train.py", capture=capture) == 1
    assert "script alone" not in capsys.readouterr().out
    assert run(plan_module, *flags, "--json", "train.py", capture=capture) == 1
    assert json.loads(capsys.readouterr().out)["plans"][0]["changes"] is None


@pytest.mark.slow
def test_a_capture_of_before_is_told_as_such(run: _Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(plan_module, "--all", "--fast", *_GPUS, "train.py", is_cached=True) == 0
    assert "\n  captured earlier    took 11.5 s, 600.0 MiB of host memory\n" in capsys.readouterr().out


@pytest.mark.slow
def test_a_model_without_a_name_is_named_once(run: _Run, capsys: pytest.CaptureFixture[str]) -> None:
    facts = replace(LOOP.model.facts, name="GPT2LMHeadModel")
    assert run(plan_module, "--fast", *_GPUS, "train.py", capture=with_model(LOOP, facts=facts)) == 0
    assert "\nGPT2LMHeadModel (124 M parameters), sequence 128" in capsys.readouterr().out


def test_a_check_with_a_capture_finds_what_the_source_does_not_show(
    run: _Run, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "ds_config.json").write_text('{"zero_optimization": {"stage": 2}, "train_batch_size": 16}')
    files = ("ds_config.json", "train.py", "--lr", "1")
    without = run(check_module, *files), capsys.readouterr()
    with_capture = run(check_module, "--capture", *files), capsys.readouterr()
    rule = "error[accumulation-not-in-deepspeed-file]"
    assert (without[0], rule in without[1].out) == (0, False)
    assert (with_capture[0], rule in with_capture[1].out) == (1, True)
    assert with_capture[1].err.startswith("train.py trains GPT2LMHeadModel of gpt2, 124 M parameters\n")
    command = ("accelerate", "launch", "--config_file", "accelerate.yaml", *files[1:])
    (folder / "accelerate.yaml").write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: DEEPSPEED\nnum_machines: 1\nnum_processes: 2\n"
        "deepspeed_config:\n  deepspeed_config_file: ds_config.json\n"
    )
    assert run(check_module, "--capture", *command) == 1
    assert rule in capsys.readouterr().out


def test_without_a_script_there_is_nothing_to_capture(run: _Run, folder: Path) -> None:
    (folder / "ds_config.json").write_text("{}")
    with pytest.raises(UserError) as error:
        run(check_module, "--capture", "ds_config.json")
    assert str(error.value) == (
        "error[capture-needs-a-script]: --capture needs exactly one script\n"
        "  found: --capture with 0 scripts\n"
        "  why:   it runs the script among the targets up to where its training would begin\n"
        "  fix:   name one script, followed by its arguments, or leave out --capture"
    )


_LOOP_SCRIPT = """\
import torch
from accelerate import Accelerator

accelerator = Accelerator(gradient_accumulation_steps=2 * 2)
model = torch.nn.Linear(2, 1)
data = torch.utils.data.DataLoader(torch.ones(8, 2), batch_size=2)
model, optimizer, data = accelerator.prepare(model, torch.optim.AdamW(model.parameters()), data)
for batch in data:
    with accelerator.accumulate(model):
        accelerator.backward(model(batch).sum())
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.slow
def test_a_check_really_runs_the_script_up_to_its_training(zerofit_fork: RunZerofit, folder: Path) -> None:
    (folder / "ds_config.json").write_text('{"zero_optimization": {"stage": 2}, "train_batch_size": 16}')
    (folder / "train.py").write_text(_LOOP_SCRIPT)
    done = zerofit_fork("check", "--capture", "ds_config.json", "train.py", cwd=folder)
    assert (done.returncode, "error[accumulation-not-in-deepspeed-file]" in done.stdout) == (1, True)
    assert "train.py trains Linear" in done.stderr
    again = zerofit_fork("check", "ds_config.json", "train.py", cwd=folder)
    assert (again.returncode, again.stdout) == (done.returncode, done.stdout)
    assert again.stderr == "zerofit: with facts of an earlier capture of this script, unchanged since\n"
    (folder / "train.py").write_text(f"{_LOOP_SCRIPT}# changed\n")
    assert zerofit_fork("check", "ds_config.json", "train.py", cwd=folder).returncode == 0


_SHARDED_SCRIPT = """\
import torch
from accelerate import Accelerator
from transformers import AutoConfig, AutoModelForCausalLM

accelerator = Accelerator()
model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained("llama"))
optimizer = torch.optim.AdamW(model.parameters())
data = torch.utils.data.DataLoader(torch.arange(32 * 16).view(32, 16), batch_size=4)
model, optimizer, data = accelerator.prepare(model, optimizer, data)
for ids in data:
    accelerator.backward(model(input_ids=ids, labels=ids).loss)
    optimizer.step()
    optimizer.zero_grad()
"""
_OF_FSDP2 = (
    *("weight shards", "gradients", "optimizer states"),
    *("gathered weights", "all-gather buffer", "reduce-scatter buffers", "gathered state dict"),
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        ("--mixed-precision", "bf16"),
        ("--mixed-precision", "no"),
        ("--mixed-precision", "bf16", "--no-reshard-after-forward"),
        ("--mixed-precision", "bf16", "--gradient-checkpointing"),
        ("--mixed-precision", "bf16", "--offload-optimizer", "cpu", "--offload-param", "cpu"),
        ("--mixed-precision", "bf16", "--state-dict-type", "full"),
    ],
)
def test_a_captured_script_holds_under_fsdp2_what_its_described_model_does(
    zerofit_fork: RunZerofit, folder: Path, flags: tuple[str, ...]
) -> None:
    from transformers import LlamaConfig

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "vocab_size": 512}
    LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2).save_pretrained(folder / "llama")
    (folder / "train.py").write_text(_SHARDED_SCRIPT)
    fixed = ("--engine", "fsdp2", "--micro-batch-size", "4", "--optimizer", "adamw")
    if "--gradient-checkpointing" not in flags:
        fixed = (*fixed, "--no-gradient-checkpointing")
    plan = ("plan", *_GPUS, *fixed, "--json")
    named = ("--model", "llama", "--seq-len", "16", "--global-batch-size", "8")

    def held(*target: str) -> dict[str, dict[str, int]]:
        done = zerofit_fork(*plan, *flags, *target, cwd=folder)
        assert done.returncode == 0, done.stderr
        (found,) = json.loads(done.stdout)["plans"]
        terms = {
            phase["phase"]: {term["name"]: term["num_bytes"] for term in phase["terms"]}
            for phase in found["chosen"]["estimate"]["device"]["phases"]
        }
        phases = (
            "initialise",
            "forward",
            "step",
            "save",
        )  # where the backward pass peaks depends on the mask
        return {phase: {name: terms[phase].get(name, 0) for name in _OF_FSDP2} for phase in phases}

    captured = held("train.py")
    assert captured == held(*named)
    assert captured["forward"]["gathered weights"] > 0


def test_a_check_knows_what_a_captured_script_can_not_take(
    run: _Run, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "ds_config.json").write_text(
        '{"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": 8, '
        '"gradient_accumulation_steps": "auto"}'
    )
    (folder / "train.py").write_text("from accelerate import Accelerator\naccelerator = Accelerator()\n")
    line = ("ds_config.json", "train.py")
    assert run(check_module, *line) == 0
    unknown = "not checked, because unknown: what the script builds, which --capture shows (local-sgd-needs-"
    assert unknown in capsys.readouterr().out
    assert run(check_module, "--capture", *line, capture=replace(LOOP, uses_local_sgd=True)) == 1
    assert (
        "error[local-sgd-needs-pytorch]: LocalSGD does not train under DeepSpeed or FSDP2\n"
        "  found: zero_optimization.stage=2   (ds_config.json:1)\n"
        "  why:   accelerate's LocalSGD runs without DeepSpeed alone\n"
        "  fix:   train on PyTorch alone (--engine native), or without LocalSGD\n"
    ) in capsys.readouterr().out


@pytest.mark.parametrize(
    ("source", "exit_code", "fix"),
    [
        (
            "raise ValueError('x')",
            1,
            "if `python train.py` fails too, fix that; if not, leave out --capture",
        ),
        pytest.param(
            "import argparse; argparse.ArgumentParser().parse_args(['--lr'])",
            2,
            "fix the arguments after",
            marks=pytest.mark.slow,
        ),
        ("print('hello')", 2, "or leave out --capture"),
    ],
)
def test_a_failed_capture_says_what_this_verb_can_do_without(
    run_zerofit: RunZerofit, folder: Path, source: str, exit_code: int, fix: str
) -> None:
    (folder / "train.py").write_text(source)
    done = run_zerofit("check", "--capture", "train.py", cwd=folder)
    assert done.returncode == exit_code, done.stderr
    assert fix in done.stderr
    assert "--model" not in done.stderr


@pytest.mark.parametrize(
    ("words", "longer"),
    [
        (
            ("plan", "--gpus", "1xT4", "--capture-limit", "1", "slow.py", "--epochs", "3"),
            "zerofit plan --gpus 1xT4 --capture-limit 4 slow.py --epochs 3",
        ),
        pytest.param(
            ("check", "--capture-limit", "1", "--capture", "slow.py", "a"),
            "zerofit check --capture --capture-limit 4 slow.py a",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ("data", "--capture-limit", "1", "slow.py"),
            "zerofit data --capture-limit 4 slow.py",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_capture_that_is_too_slow_names_the_whole_command_with_more_time(
    run_zerofit: RunZerofit, folder: Path, words: tuple[str, ...], longer: str
) -> None:
    (folder / "slow.py").write_text("import time\n\ntime.sleep(60)\n")
    text = run_zerofit(*words, cwd=folder).stderr
    assert "  found: after 1 s it was still running, and had printed nothing\n" in text
    assert f"  fix:   allow more time: `{longer}`; or " in text
