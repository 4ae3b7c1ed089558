"""zerofit plan, run for real: what it prints and writes, with closed forms and with a trace."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from planning_problems import LARGE, problem, solved
from runs import RunZerofit

from zerofit.cli.output.plan_plot import draw_plan

_Golden = Callable[[str, str], None]

_NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}
_NOTHING_TO_CHOOSE = (
    *("--no-gradient-checkpointing", "--optimizer", "adamw"),
    *("--offload-optimizer", "none", "--offload-param", "none"),
)
_BERT = ("--model", "bert-large-uncased", "--seq-len", "512", "--global-batch", "96")
_HOST = ("--host-bandwidth", "100GB/s")
_A100 = ("--gpus", "4xA100-40G", "--host-ram", "512G", "--nvme", "7T", "--cpu-cores", "32", *_HOST)
_SMALL = ("--gpus", "1xT4", "--host-ram", "8G", "--cpu-cores", "4", *_HOST)
_LARGE = ("--model", "llama-2-7b", "--seq-len", "1024", "--global-batch", "8")


def _plan(
    run_zerofit: RunZerofit, folder: Path, *flags: str, columns: int | None = None
) -> subprocess.CompletedProcess[str]:
    environment = {**_NO_GPU, "XDG_CACHE_HOME": str(folder.parent / "cache")}
    if columns is not None:
        environment["COLUMNS"] = str(columns)
    return run_zerofit("plan", *flags, cwd=folder, environment=environment)


@pytest.fixture
def folder(tmp_path: Path, cache_folder: Path) -> Path:
    """Return an empty folder, beside which there is room for caches."""
    (tmp_path / "here").mkdir()
    (tmp_path / "cache").symlink_to(cache_folder)
    return tmp_path / "here"


@pytest.mark.parametrize(
    ("name", "flags", "exit_code"),
    [
        pytest.param("nothing-fits", (*_LARGE, *_SMALL), 1, marks=pytest.mark.slow),
        ("allowed", (*_LARGE, "--gpus", "1xA100-40G", "--host-ram", "16G", "--allow", "lora"), 0),
    ],
)
def test_text(
    run_zerofit: RunZerofit,
    golden: _Golden,
    folder: Path,
    name: str,
    flags: tuple[str, ...],
    exit_code: int,
) -> None:
    finished = _plan(run_zerofit, folder, "--fast", *flags)
    golden(finished.stdout, f"planned/{name}.txt")
    assert finished.returncode == exit_code
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        pytest.param("fits", (*_BERT, *_A100), marks=pytest.mark.slow),
        ("why", (*_BERT, *_A100, "--why", "--zero-stage", "2")),
        pytest.param("compare", (*_BERT, "--gpus", "4xA100-40G", "--gpus", "1xT4"), marks=pytest.mark.slow),
    ],
)
def test_text_fits_a_terminal_of_80_columns_unless_it_may_be_wider(
    run_zerofit: RunZerofit, golden: _Golden, folder: Path, name: str, flags: tuple[str, ...]
) -> None:
    narrow = _plan(run_zerofit, folder, "--fast", *flags, columns=80).stdout
    golden(narrow, f"planned/{name}-80.txt")
    assert [line for line in narrow.splitlines() if len(line) > 80 and " " in line.strip()] == []  # but links
    wide = _plan(run_zerofit, folder, "--fast", *flags, "--wide", columns=80)
    golden(wide.stdout, f"planned/{name}.txt")
    assert wide.returncode == 0
    assert list(folder.iterdir()) == []


def test_what_is_assumed_goes_to_stderr(run_zerofit: RunZerofit, folder: Path) -> None:
    finished = _plan(run_zerofit, folder, "--fast", *_BERT, "--gpus", "4xA100-40G", "--nvme", "7T")
    assert finished.stderr == (
        "zerofit: assumed: 240.0 GiB of host memory on each node (--host-ram); 24 CPU cores on each node "
        "(--cpu-cores); 100 GB/s of host memory bandwidth on each node (--host-bandwidth)\n"
    )
    explained = _plan(run_zerofit, folder, "--fast", *_BERT, "--gpus", "4xA100-40G", "--nvme", "7T", "--why")
    assert explained.stderr == (
        "zerofit: assumed: 240.0 GiB of host memory on each node, 1.5 times that of its GPUs: "
        "set --host-ram\n"
        "zerofit: assumed: 24 CPU cores on each node, 6 per GPU: set --cpu-cores\n"
        "zerofit: assumed: 100 GB/s of host memory bandwidth on each node: set --host-bandwidth\n"
    )


_ASSUMED = ", which is assumed: set --host-ram"


@pytest.mark.parametrize(
    ("flags", "is_assumed"),
    [
        (("--gpus", "4xA100-40G"), True),
        (("--gpus", "1xRTX4090", "--nvme", "1T"), True),
        pytest.param(("--gpus", "2x24G", "--cpu-cores", "16"), True, marks=pytest.mark.slow),
        (("--gpus", "8xH100-80G", "--num-machines", "2"), True),
        (("--gpus", "4xA100-40G", "--host-ram", "240G"), False),
        pytest.param(
            ("--gpus", "8xH100-80G", "--num-machines", "2", "--host-ram", "1T"), False, marks=pytest.mark.slow
        ),
    ],
)
def test_the_answer_itself_says_that_host_memory_is_assumed(
    run_zerofit: RunZerofit, folder: Path, flags: tuple[str, ...], is_assumed: bool
) -> None:
    said = _plan(run_zerofit, folder, "--fast", *_BERT, *flags, *_NOTHING_TO_CHOOSE).stdout
    (line,) = [line for line in said.splitlines() if line.startswith("on ")]
    assert line.endswith(f" of host memory{_ASSUMED if is_assumed else ''}")


_BY_CLOSED_FORMS = "chosen by closed forms, and a trace may choose another: leave out --fast for that"


@pytest.mark.parametrize(
    "flags",
    [
        (*_BERT, "--gpus", "4xA100-40G"),
        (*_BERT, "--gpus", "1xRTX4090", "--host-ram", "64G"),
        ("--model", "gpt2", "--seq-len", "512", "--global-batch-size", "16", "--gpus", "2xT4"),
        pytest.param(
            (
                "--model",
                "llama-3-8b",
                "--seq-len",
                "2048",
                "--global-batch-size",
                "32",
                "--gpus",
                "8xH100-80G",
            ),
            marks=pytest.mark.slow,
        ),
        (
            "--model",
            "llama-3-8b",
            "--seq-len",
            "512",
            "--global-batch-size",
            "8",
            "--gpus",
            "8xA100-80G",
            "--lora",
        ),
    ],
)
def test_a_verb_that_takes_the_choice_of_closed_forms_says_so(
    run_zerofit: RunZerofit, folder: Path, flags: tuple[str, ...]
) -> None:
    finished = run_zerofit("config", "--fast", "--output-dir", "out", *flags, cwd=folder)
    assert finished.returncode == 0, finished.stderr
    assert _BY_CLOSED_FORMS in finished.stdout + finished.stderr


def _shape(value: Any) -> Any:
    """Return a document with each value replaced by its type, and each list by its first element."""
    if isinstance(value, dict):
        return {name: _shape(below) for name, below in value.items()}
    if isinstance(value, list):
        return [_shape(value[0])] if value else []
    return type(value).__name__


def test_the_json_document_keeps_its_shape(run_zerofit: RunZerofit, golden: _Golden, folder: Path) -> None:
    finished = _plan(run_zerofit, folder, "--fast", "--json", *_BERT, *_A100)
    golden(json.dumps(_shape(json.loads(finished.stdout)), indent=2) + "\n", "planned/shape.json")
    (plan,) = json.loads(finished.stdout)["plans"]
    assert plan["chosen"] is None
    assert [row["fit"] for row in plan["screen"]["rows"]] == ["fits"] * 10
    for judged in (*plan["screen"]["rows"], *plan["others"], *plan["variants"]):
        device = judged["estimate"]["device"]
        totals = [sum(term["num_bytes"] for term in phase["terms"]) for phase in device["phases"]]
        assert max(totals) == device["peak_bytes"]
        assert judged["fits"] == (judged["lacks"] is None)
        assert (device["peak_bytes"] <= plan["device_bytes"]) or not judged["fits"]


def test_the_plan_is_what_config_and_launch_take(run_zerofit: RunZerofit, folder: Path) -> None:
    fixed = ("--zero-stage", "3", "--micro-batch-size", "8", *_NOTHING_TO_CHOOSE)
    finished = _plan(run_zerofit, folder, "--fast", *_BERT, *_A100, *fixed, "--output", "plan.json")
    assert finished.returncode == 0
    written = json.loads((folder / "plan.json").read_text())
    batch = (written["strategy"]["micro_batch_size"], written["strategy"]["gradient_accumulation_steps"])
    assert (written["strategy"]["zero_stage"], batch) == (3, (8, 3))
    made = run_zerofit("config", "--plan", "plan.json", cwd=folder, environment=_NO_GPU)
    assert made.returncode == 0, made.stderr
    config = json.loads((folder / "ds_config.json").read_text())
    assert (config["zero_optimization"]["stage"], config["train_micro_batch_size_per_gpu"]) == (3, 8)
    asked = run_zerofit(
        "config", "--dry-run", "--fast", *_BERT, *_A100, *fixed, cwd=folder, environment=_NO_GPU
    )
    assert f"# ds_config.json\n{(folder / 'ds_config.json').read_text()}" in asked.stdout


def test_a_plan_that_differs_is_not_written_over(run_zerofit: RunZerofit, folder: Path) -> None:
    (folder / "plan.json").write_text("mine")
    flags = ("--fast", *_BERT, *_A100, "--output", "plan.json", "--zero-stage", "3", *_NOTHING_TO_CHOOSE)
    flags = (*flags, "--micro-batch-size", "8")
    finished = _plan(run_zerofit, folder, *flags)
    assert finished.stderr == (
        "error[file-exists]: the file exists and differs\n"
        "  found: plan.json\n"
        "  why:   it may contain your work\n"
        "  fix:   write elsewhere with --output FILE, or overwrite with --force\n"
    )
    assert ((folder / "plan.json").read_text(), finished.stdout, finished.returncode) == ("mine", "", 2)
    assert _plan(run_zerofit, folder, *flags, "--force").returncode == 0
    assert json.loads((folder / "plan.json").read_text())["strategy"]


def test_a_choice_that_closed_forms_leave_open_is_not_written(run_zerofit: RunZerofit, folder: Path) -> None:
    finished = _plan(run_zerofit, folder, "--fast", *_BERT, *_A100, "--output", "plan.json")
    reason = "--fast leaves open which strategy is the fastest"
    assert finished.stderr.endswith(f"zerofit: {reason}, so plan.json is not written\n")
    assert (finished.returncode, list(folder.iterdir())) == (1, [])


def test_what_does_not_fit_is_not_written(run_zerofit: RunZerofit, folder: Path) -> None:
    flags = ("--fast", *_LARGE, *_SMALL, "--engine", "native")  # without DeepSpeed there is less to search
    finished = _plan(run_zerofit, folder, *flags, "--output", "plan.json")
    assert finished.stderr.endswith("zerofit: nothing fits, so plan.json is not written\n")
    assert (finished.returncode, list(folder.iterdir())) == (1, [])


@pytest.mark.parametrize("flag", ["--seq-len", "--seq_len", "--sequence-length", "--max_seq_length"])
def test_other_names_of_the_length(flag: str) -> None:
    from zerofit.cli.plan import plan

    assert plan.make_context("plan", ["--model", "m", flag, "7"]).params["sequence_length"] == 7


_TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "vocab_size": 256,
    "torch_dtype": "bfloat16",
}


@pytest.mark.slow
def test_a_model_of_ones_own_is_traced_once(run_zerofit: RunZerofit, folder: Path) -> None:
    (folder.parent / "tiny").mkdir()
    (folder.parent / "tiny" / "config.json").write_text(json.dumps(_TINY))
    flags = ("--model", "../tiny", "--seq-len", "64", "--global-batch", "8", *_A100)
    first = _plan(run_zerofit, folder, *flags, "--json")
    assert first.returncode == 0, first.stderr
    (plan,) = json.loads(first.stdout)["plans"]
    sources = {
        term["name"]: term["source"]
        for phase in plan["chosen"]["estimate"]["device"]["phases"]
        for term in phase["terms"]
    }
    assert (sources["activations"], plan["is_fast"]) == ("traced", False)
    assert plan["chosen"]["strategy"]["micro_batch_size"] == 2
    cache = folder.parent / "cache" / "zerofit"
    assert {path.name for path in cache.iterdir()} == {"traces"}
    written = _written(cache / "traces")
    assert written
    again = _plan(run_zerofit, folder, *flags, "--json")
    assert again.stdout == first.stdout
    other = _plan(run_zerofit, folder, *flags, "--global-batch", "16")
    assert other.returncode == 0
    assert _written(cache / "traces") == written


def _written(folder: Path) -> dict[str, int]:
    """Return when each file below a folder was written."""
    return {str(path): path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


def test_what_a_catalog_entry_stands_for_is_said(run_zerofit: RunZerofit, folder: Path) -> None:
    flags = ("--model", "Qwen/Qwen-7B", "--seq-len", "512", "--global-batch", "8", *_A100)
    stderr = _plan(run_zerofit, folder, "--fast", *flags, *_NOTHING_TO_CHOOSE).stderr
    assert stderr.startswith("zerofit: assumed: qwen-7b: remote code on the hub; this is the Qwen2 class")


def test_a_note_of_a_comparison_names_its_machine(run_zerofit: RunZerofit, folder: Path) -> None:
    gpus = ("--gpus", "4xA100-40G", "--gpus", "1xT4")
    stderr = _plan(run_zerofit, folder, "--fast", *_BERT, *gpus, *_NOTHING_TO_CHOOSE).stderr
    for machine, cores in (("4 x NVIDIA A100-SXM4-40GB", 24), ("1 x Tesla T4", 6)):
        (line,) = (line for line in stderr.splitlines() if line.startswith(f"zerofit: assumed: {machine}: "))
        assert f"; {cores} CPU cores on each node (--cpu-cores)" in line


def test_a_target_is_held_against_the_models_positions(run_zerofit: RunZerofit, folder: Path) -> None:
    flags = ("--model", "bart-large", "--seq-len", "512", "--target-len", "2000", "--global-batch", "8")
    finished = _plan(run_zerofit, folder, "--fast", *flags, *_A100)
    assert finished.stderr.startswith("error[sequence-too-long]")
    assert "--target-len 2000" in finished.stderr


def test_a_plot_is_drawn_and_not_written_over(run_zerofit: RunZerofit, folder: Path) -> None:
    pytest.importorskip("matplotlib")
    flags = ("--fast", *_BERT, *_A100, *_NOTHING_TO_CHOOSE, "--plot", "plan.png")
    first, again, forced = (_plan(run_zerofit, folder, *flags, *more) for more in ((), (), ("--force",)))
    assert (first.returncode, forced.returncode) == (0, 0), first.stderr
    assert (folder / "plan.png").read_bytes().startswith(b"\x89PNG")
    assert (again.returncode, again.stdout) == (2, "")
    assert again.stderr.startswith("error[file-exists]: the file exists and differs\n")
    assert "overwrite with --force" in again.stderr


def test_a_plot_marks_the_choice_and_shows_what_is_too_large(folder: Path) -> None:
    pytest.importorskip("matplotlib")
    answer = solved(problem(facts=LARGE, num_gpus=8, memory_gib=36, global_batch_size=8))
    draw_plan(answer, folder / "plan.svg")
    words = re.findall(r"<!-- (.*) -->", (folder / "plan.svg").read_text())  # of each text that is drawn
    assert (words.count("chosen"), words.count("at least")) == (1, 1)
    assert "DDP" in words
    assert "too large" in words


@pytest.mark.slow
def test_layouts_are_listed_and_plotted_beside_each_other(run_zerofit: RunZerofit, folder: Path) -> None:
    pytest.importorskip("matplotlib")
    model = "--fast --model llama-3.1-8b --seq-len 131072 --no-padded --global-batch-size 8 --gpus 8xH100-80G"
    flags = "--zero-stage 3 --compare-layouts --plot plan.svg"
    finished = _plan(run_zerofit, folder, *model.split(), *flags.split())
    assert finished.returncode == 0, finished.stderr
    table = finished.stdout[finished.stdout.index("layouts: dp x tp x sp x pp ranks") :]
    table = table.partition("\n\n")[0].splitlines()
    fitting = [line.split()[:4] for line in table if line.endswith("  fits")]
    assert fitting == [["1", "1", "8", "1"]]
    assert len(table) == 2 + 1 + 3 + 3 + 3
    drawn = (folder / "plan.svg").read_text()
    assert [drawn.count(f"<!-- {word} -->") for word in ("chosen", "too large")] == [0, 5]


def test_without_matplotlib_a_plot_is_refused(
    run_zerofit: RunZerofit, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.backend_bases", None)  # its import fails
    finished = _plan(run_zerofit, folder, "--fast", *_BERT, *_A100, "--plot", "plan.png")
    assert finished.stderr == (
        "error[plots-missing]: plots need matplotlib\n"
        "  found: --plot plan.png, and no matplotlib in this environment\n"
        "  why:   zerofit does not install it, as only plots need it\n"
        "  fix:   pip install 'zerofit[plots]', or leave out --plot\n"
    )
    assert finished.returncode == 2


def test_fast_says_that_names_were_not_looked_up(run_zerofit: RunZerofit, tmp_path: Path) -> None:
    line = "plan --model bert-base-uncased --seq-len 128 --global-batch-size 8 --gpus 1xA100-80G --fast"
    flags = ("--freeze", "*nomatch*", "--lora", "--lora-targets", "foo")
    finished = run_zerofit(*line.split(), *flags, cwd=tmp_path)
    said = "--freeze *nomatch* and --lora-targets foo can't be checked with --fast"
    assert said in finished.stderr


@pytest.mark.parametrize(
    ("flags", "found"),
    [
        (("--global-batch-size", "7"), "--global-batch-size 7 with 2 ranks"),
        (
            (
                *("--global-batch-size", "16", "--micro-batch-size", "3"),
                *("--gradient-accumulation-steps", "2"),
            ),
            "--global-batch-size 16 with 2 ranks x micro-batch 3 x accumulation 2 = 12",
        ),
    ],
)
def test_a_batch_that_ranks_do_not_make_is_refused_before_the_script_runs(
    run_zerofit: RunZerofit, tmp_path: Path, flags: tuple[str, ...], found: str
) -> None:
    (tmp_path / "never.py").write_text("raise SystemExit('it ran')\n")
    run = run_zerofit("plan", "--gpus", "2xA100-80G", *flags, "never.py", cwd=tmp_path)
    assert run.stderr.splitlines()[:2] == [
        "error[global-batch-not-divisible]: the global batch can't be made from these parts",
        f"  found: {found}",
    ]
