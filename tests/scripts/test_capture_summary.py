"""Summaries of a capture, for a person and for a program."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from captures import LOOP, TRAINER, with_model

from zerofit.core.capture import Capture
from zerofit.scripts.capture_summary import capture_lines, capture_summary
from zerofit.scripts.target import script_of


def test_an_ordinary_loop() -> None:
    assert capture_lines(LOOP) == (
        "train.py trains GPT2LMHeadModel of gpt2, 124 M parameters",
        "  loop                its own, with Accelerator, accumulate(), begins at train.py:118",
        "  weights             float32",
        "  optimizer           AdamW, lr 5e-05, 2 parameter groups",
        "  batch on each rank  8 x 2",
        "  tokens              half up to 96, 90% up to 120, longest 128 (64 samples)",
        "  mixed precision     none named",
        "  captured in         11.5 s, 600.0 MiB of host memory",
    )


@pytest.mark.parametrize(
    ("capture", "line"),
    [
        (TRAINER, "  loop                Trainer, begins at train.py:118"),
        (replace(TRAINER, stopped_at=""), "  loop                Trainer"),
        (
            replace(LOOP, splits_batches=True),
            "  batch on each rank  8 x 2, split over all ranks (split_batches)",
        ),
        (replace(LOOP, micro_batch_size=None), "  batch on each rank  not known, accumulation of 2"),
        (
            replace(LOOP, gradient_accumulation_steps=1, accumulates_by_hand=4),
            "  batch on each rank  8 x 1, stepped every 4",
        ),
        (replace(LOOP, names_precision=True), "  mixed precision     no, as it says"),
        (replace(LOOP, optimizers=()), "  optimizer           none was seen"),
        (replace(LOOP, optimizers=LOOP.optimizers * 2), "  optimizer           2: AdamW, AdamW"),
        (replace(LOOP, notes=("the second model is left out",)), "  note: the second model is left out"),
        (
            with_model(LOOP, adapters=("LORA",), is_quantized=True, checkpoints=True),
            "  weights             float32, adapters: LORA, quantized, gradient checkpointing",
        ),
        (
            with_model(LOOP, modules=(replace(LOOP.model.modules[0], num_trainable_parameters=1000),)),
            "  weights             float32, 1,000 of 124,439,808 train",
        ),
        (
            replace(LOOP, target=("-m", "package.train", "--x")),
            "module package.train trains GPT2LMHeadModel of gpt2, 124 M parameters",
        ),
        (with_model(LOOP, name="GPT2LMHeadModel"), "train.py trains GPT2LMHeadModel, 124 M parameters"),
    ],
)
def test_line(capture: Capture, line: str) -> None:
    assert line in capture_lines(capture)


def test_a_capture_of_before_says_so() -> None:
    line = "  captured earlier    took 11.5 s, 600.0 MiB of host memory"
    assert capture_lines(LOOP, is_cached=True)[-1] == line


def test_what_is_not_known_has_no_line() -> None:
    lines = capture_lines(replace(LOOP, lengths=None, wall_time_s=0.0))
    assert [line for line in lines if line.startswith(("  tokens", "  captured"))] == []


def test_the_summary_is_json_and_short() -> None:
    summary = json.loads(json.dumps(capture_summary(LOOP)))
    assert (summary["micro_batch_size"], summary["optimizer"]) == (8, "torch.optim.adamw.AdamW")
    assert summary["model"]["num_trainable_parameters"] == 124_439_808
    assert summary["lengths"]["longest"] == 128
    assert "modules" not in summary["model"]


@pytest.mark.parametrize(
    ("target", "script"),
    [(("train.py", "-m", "x"), "train.py"), (("-m", "pkg.train", "--y"), "-m pkg.train"), (("-m",), "-m")],
)
def test_script_of_a_command_line(target: tuple[str, ...], script: str) -> None:
    assert script_of(target) == script
