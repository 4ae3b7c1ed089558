"""Tensor-parallel launches train what one process trains, in a loop and with Trainer."""

from __future__ import annotations

import json
import shutil
import sys
from itertools import chain
from typing import TYPE_CHECKING, Any

import pytest
from runs import SCRIPTS, Run, run_command

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

TOLERANCE = 2e-5
"""Relative. Sums over the ranks of a group are rounded in another order; twelve AdamW steps carry that on."""
WEIGHT_TOLERANCE = 5e-5
"""Absolute, of weights of about 0.1 after as many steps."""
NUM_STEPS = 12
SAVED_AT = 4
_LLAMA = {"model_type": "llama", "num_key_value_heads": 2}
MODELS: dict[str, dict[str, Any]] = {
    "llama": _LLAMA,
    "tied": {**_LLAMA, "tie_word_embeddings": True},
    "one key-value head": {**_LLAMA, "num_key_value_heads": 1},
    "three heads": {**_LLAMA, "num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 48},
    "qwen2": {"model_type": "qwen2", "num_key_value_heads": 2},
    "qwen3": {"model_type": "qwen3", "num_key_value_heads": 2, "head_dim": 16},
    "mistral": {"model_type": "mistral", "num_key_value_heads": 2},
    "gemma2": {"model_type": "gemma2", "num_key_value_heads": 2, "head_dim": 16},
    "gpt_neox": {"model_type": "gpt_neox"},
    "opt": {"model_type": "opt", "word_embed_proj_dim": 64, "ffn_dim": 128, "dropout": 0.0},
    "gpt2": {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4},
    "mixtral": {"model_type": "mixtral", "num_key_value_heads": 2, "num_local_experts": 4},
    "dropout": {**_LLAMA, "num_key_value_heads": 1, "attention_dropout": 0.1},
}
_PAIR = ("--num-processes", "2", "--tensor-parallel-size", "2")
_TWO_PAIRS = ("--num-processes", "4", "--tensor-parallel-size", "2")


@pytest.fixture(scope="session")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Save an untrained model of a kind once, and return its folder."""
    folder = tmp_path_factory.mktemp("models")

    def make(kind: str) -> Path:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        path = folder / kind.replace(" ", "-")
        if path.exists():
            return path
        fields: dict[str, Any] = {"vocab_size": 128, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
        if kind != "gpt2":
            fields |= {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
            fields |= {"num_attention_heads": 4, "max_position_embeddings": 64}
        with torch.random.fork_rng():
            torch.manual_seed(0)
            config = AutoConfig.for_model(**{**fields, **MODELS[kind]})
            AutoModelForCausalLM.from_config(config).save_pretrained(path)
        return path

    return make


@pytest.fixture(scope="session")
def reference(
    model_of: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Path]:
    """Train in one process without zerofit, once for each model, and return what that wrote."""
    done: dict[tuple[str, ...], Path] = {}

    def train(kind: str, *arguments: str) -> Path:
        key = (kind, *arguments)
        if key not in done:
            folder = tmp_path_factory.mktemp("one-process")
            run_command(
                [sys.executable, *_script(model_of(kind), *arguments)], folder, ACCELERATE_USE_CPU="true"
            ).check()
            done[key] = folder / "out"
        return done[key]

    return train


def _script(model: Path, *arguments: str) -> list[str]:
    return [str(SCRIPTS / "several_dimensions.py"), "--model", str(model), *arguments]


def _ranks(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("rank*.json"))]


def assert_trains_as(folder: Path, reference: Path, *, group: int = 2) -> None:
    """Check batches, losses, learning rates, what is gathered, and the saved weights."""
    ranks, (alone,) = _ranks(folder), _ranks(reference)
    first = ranks[0]
    for number, rank in enumerate(ranks):
        assert rank["seen"] == ranks[number // group * group]["seen"]
    shares = [rank["seen"] for rank in ranks[::group]]
    per_step = [sorted(chain(*batches)) for batches in zip(*shares, strict=True)]
    assert per_step == [sorted(batch) for batch in alone["seen"]][-len(per_step) :]
    steps, expected = first["steps"], alone["steps"][-len(first["steps"]) :]
    assert [step for step, _, _ in steps] == [step for step, _, _ in expected]
    assert [rate for _, _, rate in steps] == pytest.approx([rate for _, _, rate in expected], rel=1e-9)
    assert [loss for _, loss, _ in steps] == pytest.approx([loss for _, loss, _ in expected], rel=TOLERANCE)
    assert first["samples_per_step"] == alone["samples_per_step"]
    assert first["eval_tokens"] == alone["eval_tokens"]
    assert first["generated"] == alone["generated"]
    assert first["summed"] == len(shares)
    assert_same_weights(folder, reference)


def assert_same_weights(folder: Path, reference: Path) -> None:
    """Check that both files hold the same tensors, and that from_pretrained() finds each of them."""
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    saved, expected = (load_file(one / "model" / "model.safetensors") for one in (folder, reference))
    assert saved.keys() == expected.keys()
    for name, weight in expected.items():
        assert (saved[name] - weight).abs().max().item() < WEIGHT_TOLERANCE, name
    _, found = AutoModelForCausalLM.from_pretrained(folder / "model", output_loading_info=True)
    assert not found["missing_keys"]
    assert not found["mismatched_keys"]


@pytest.mark.parametrize("by_trainer", [False, True], ids=["loop", "trainer"])
@pytest.mark.parametrize("ranks", [_PAIR, pytest.param(_TWO_PAIRS, marks=pytest.mark.slow)], ids=["2", "4"])
def test_a_script_trains_as_in_one_process(
    ranks: tuple[str, ...],
    by_trainer: bool,
    launch: Callable[..., Run],
    model_of: Callable[[str], Path],
    reference: Callable[..., Path],
) -> None:
    """At ZeRO-2 with clipping, a schedule, held-out data that fill no batch, generation and tied weights."""
    more = ("--trainer",) if by_trainer else ()
    size = "8" if ranks is _PAIR else "4"
    run = launch(*ranks, "--zero-stage", "2", *_script(model_of("tied"), "--batch-size", size, *more)).check()
    assert_trains_as(run.folder / "out", reference("tied", "--batch-size", "8", *more))
    config = json.loads((run.run_folder / "ds_config.json").read_text())
    assert config["tensor_parallel"] == {"autotp_size": 2}


_CASES = {
    "stage 0": (_PAIR, "0", ()),
    "stage 1": (_PAIR, "1", ()),
    "stage 3": (_TWO_PAIRS, "3", ()),
    "stage 2, optimizer on the host": (_PAIR, "2", ("--offload-optimizer", "cpu")),
    "stage 3, all on the host": (_TWO_PAIRS, "3", ("--offload-optimizer", "cpu", "--offload-param", "cpu")),
    "stage 2, checkpointing": (_PAIR, "2", ("--gradient-checkpointing",)),
    "stage 2, micro-batches": (_PAIR, "2", ("--micro-batch-size", "2")),
}


@pytest.mark.evidence
@pytest.mark.parametrize("case", _CASES)
@pytest.mark.parametrize("by_trainer", [False, True], ids=["loop", "trainer"])
def test_every_stage_trains_alike(
    case: str,
    by_trainer: bool,
    launch: Callable[..., Run],
    model_of: Callable[[str], Path],
    reference: Callable[..., Path],
) -> None:
    ranks, stage, flags = _CASES[case]
    size = "8" if ranks is _PAIR else "4"
    more = ("--trainer",) if by_trainer else ()
    target = _script(model_of("llama"), "--batch-size", size, *more)
    run = launch(*ranks, "--zero-stage", stage, *flags, *target).check()
    assert_trains_as(run.folder / "out", reference("llama", "--batch-size", "8", *more))


@pytest.mark.evidence
@pytest.mark.parametrize("kind", [kind for kind in MODELS if kind not in ("gpt2", "mixtral", "dropout")])
def test_every_family_trains_alike(
    kind: str,
    launch: Callable[..., Run],
    model_of: Callable[[str], Path],
    reference: Callable[..., Path],
) -> None:
    target = _script(model_of(kind), "--batch-size", "8")
    run = launch(*_PAIR, "--zero-stage", "2", *target).check()
    assert_trains_as(run.folder / "out", reference(kind, "--batch-size", "8"))


@pytest.mark.evidence
@pytest.mark.parametrize("stage", ["2", "3"])
@pytest.mark.parametrize("by_trainer", [False, True], ids=["loop", "trainer"])
def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(
    stage: str,
    by_trainer: bool,
    launch: Callable[..., Run],
    model_of: Callable[[str], Path],
    reference: Callable[..., Path],
) -> None:
    more = ("--trainer",) if by_trainer else ()
    target = _script(model_of("llama"), "--batch-size", "4", f"--save-step={SAVED_AT}", *more)
    run = launch(*_TWO_PAIRS, "--zero-stage", stage, *target).check()
    saved = run.folder / "out" / (f"checkpoint-{SAVED_AT}" if by_trainer else "state")
    kept = run.folder / "kept"
    shutil.move(saved, kept)
    for path in (run.folder / "out", run.folder / "zerofit-runs"):
        shutil.rmtree(path)
    resumed = launch(*_TWO_PAIRS, "--zero-stage", stage, *target, "--resume", str(kept)).check()
    alone = reference("llama", "--batch-size", "8", *more)
    (first, *_), (whole,) = _ranks(resumed.folder / "out"), _ranks(alone)
    assert len(first["steps"]) == NUM_STEPS - SAVED_AT
    losses = [loss for _, loss, _ in whole["steps"][SAVED_AT:]]
    assert [loss for _, loss, _ in first["steps"]] == pytest.approx(losses, rel=TOLERANCE)
    assert_same_weights(resumed.folder / "out", alone)


@pytest.mark.evidence
@pytest.mark.parametrize("by_trainer", [False, True], ids=["loop", "trainer"])
def test_accumulated_batches_make_the_same_steps(
    by_trainer: bool,
    launch: Callable[..., Run],
    model_of: Callable[[str], Path],
    reference: Callable[..., Path],
) -> None:
    more = ("--accumulation", "2", *(("--trainer",) if by_trainer else ()))
    run = launch(
        *_TWO_PAIRS, "--zero-stage", "2", *_script(model_of("llama"), "--batch-size", "4", *more)
    ).check()
    assert_trains_as(run.folder / "out", reference("llama", "--batch-size", "8", *more))


@pytest.mark.evidence
def test_ranks_that_made_other_weights_start_with_those_of_the_first(
    launch: Callable[..., Run], model_of: Callable[[str], Path], reference: Callable[..., Path]
) -> None:
    target = _script(model_of("llama"), "--batch-size", "4", "--fresh-head")
    run = launch(*_TWO_PAIRS, "--zero-stage", "2", *target).check()
    assert_trains_as(run.folder / "out", reference("llama", "--batch-size", "8", "--fresh-head"))


@pytest.mark.evidence
def test_a_stream_that_all_groups_would_share_is_refused(
    launch: Callable[..., Run], model_of: Callable[[str], Path]
) -> None:
    run = launch(*_TWO_PAIRS, "--zero-stage", "2", *_script(model_of("llama"), "--stream"))
    assert run.exit_code == 2
    assert "all groups of ranks would train on the same samples" in run.stderr


@pytest.mark.evidence
def test_a_checkpoint_resumes_with_its_own_size_alone(
    launch: Callable[..., Run], model_of: Callable[[str], Path]
) -> None:
    target = _script(model_of("llama"), "--batch-size", "4", f"--save-step={SAVED_AT}")
    run = launch(*_PAIR, "--zero-stage", "2", *target).check()
    resumed = launch("--num-processes", "2", "--zero-stage", "2", *target, "--resume", "out/state")
    assert resumed.exit_code == 2
    assert "out/state: layers cut over 2 ranks, and 1 are to go on" in resumed.stderr
    command = [sys.executable, "-m", "zerofit", "export", "out/state", "--out", "whole"]
    exported = run_command(command, run.folder)
    assert exported.exit_code == 2
    assert "export-of-cut-layers" in exported.stderr


REFUSED = {
    "gpt2": "DeepSpeed can't cut this model for tensor parallelism",
    "mixtral": "DeepSpeed can't cut this model for tensor parallelism",
    "dropout": "ranks with other numbers of heads draw other random numbers",
}


@pytest.mark.evidence
@pytest.mark.parametrize("kind", REFUSED)
def test_a_model_that_comes_out_wrong_is_refused(
    kind: str, launch: Callable[..., Run], model_of: Callable[[str], Path]
) -> None:
    run = launch(*_PAIR, "--zero-stage", "2", *_script(model_of(kind)))
    assert run.exit_code == 2
    assert REFUSED[kind] in run.stderr
    assert "Traceback" not in run.stderr
