"""zerofit.plan for scripts and notebooks: settings as keyword arguments, the plan with its table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import zerofit
from zerofit.core.facts import Versions
from zerofit.core.observer import Observer
from zerofit.core.plan import plan_from_json, plan_to_json
from zerofit.core.strategy import Lora, Precision, ZeroStage
from zerofit.planning.answer_lines import as_it_is_lines
from zerofit.planning.plan_labels import rate
from zerofit.planning.plan_table import plan_table
from zerofit.planning.solve import Answer
from zerofit.planning.sources.settings import settings_of
from zerofit.planning.subject import describe, loaded_format

_MODEL: dict[str, Any] = {
    "model": "gpt2",
    "sequence_length": 512,
    "global_batch_size": 64,
    "gpus": "8xA100-40G",
    "is_fast": True,
}


def test_it_returns_the_plan_with_the_table_that_the_command_prints(tmp_path: Path, run_zerofit: Any) -> None:
    answer = zerofit.plan(**_MODEL, zero_stage=2, precision="bf16", micro_batch_size=4)
    strategy = answer.plan.strategy
    assert (strategy.zero_stage, strategy.precision) == (ZeroStage.GRADIENTS, Precision.BF16)
    assert strategy.micro_batch_size * strategy.gradient_accumulation_steps * 8 == 64
    assert answer.fits
    words = "plan --fast --model gpt2 --seq-len 512 --global-batch-size 64 --gpus 8xA100-40G --zero-stage 2"
    printed = run_zerofit(
        *words.split(), "--mixed-precision", "bf16", "--micro-batch-size", "4", cwd=tmp_path
    )
    more = "more: --all (every strategy, the model, the peak), --why (every reason)"
    assert f"{answer}\n\n{more}\n" == printed.stdout


def test_it_is_a_plan_that_a_file_can_hold() -> None:
    plan = zerofit.plan(**_MODEL).plan
    read = plan_from_json(plan_to_json(plan), name="plan.json")
    assert (read.strategy, read.topology, read.estimate) == (plan.strategy, plan.topology, plan.estimate)


def test_a_notebook_shows_it_as_a_table() -> None:
    shown = zerofit.plan(**_MODEL)._repr_html_()
    assert shown.startswith("<p>gpt2 (GPT2LMHeadModel, 124 M parameters), sequence 512, global batch 64")
    assert shown.count("<tr>") > 2
    assert "<th>strategy</th>" in shown
    assert "<th>GiB needed</th>" in shown


def test_where_nothing_fits_it_says_so_and_what_would() -> None:
    fixed = {"optimizer": "adamw", "gradient_checkpointing": True, "micro_batch_size": 1}
    answer = zerofit.plan(**{**_MODEL, "model": "llama-3-8b", "gpus": "1xRTX3090"}, **fixed)
    assert not answer.fits
    assert "Nothing fits. Nearest is" in str(answer)


def test_an_observer_hears_of_assumptions_only_if_there_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    class Listener(Observer):
        def __init__(self) -> None:
            self.heard: list[str] = []

        def say(self, sentence: str) -> None:
            self.heard.append(sentence)

    zerofit.plan(**_MODEL, observer=Listener())
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("settings", "rule", "fix"),
    [
        ({"sequnce_length": 3}, "unknown-setting", "did you mean sequence_length=3?"),
        ({"zero_stage": 5}, "bad-value", "write it like zero_stage=3"),
        ({"precision": "fp8"}, "bad-value", "write it like precision='bf16'"),
        ({"global_batch_size": None}, "global-batch-missing", None),
        ({"capture_limit_s": 5}, "capture-limit-without-capture", "leave out --capture-limit"),
        ({"model": None}, "model-missing", None),
    ],
)
def test_what_is_wrong_is_named(settings: dict[str, Any], rule: str, fix: str | None) -> None:
    with pytest.raises(zerofit.UserError) as error:
        zerofit.plan(**{**_MODEL, **settings})
    assert error.value.rule == rule
    assert fix is None or error.value.fix == fix


def test_settings_have_the_names_of_their_flags_too() -> None:
    plan = zerofit.plan(**_MODEL, offload_optimizer="cpu", mixed_precision="bf16").plan
    assert (plan.strategy.optimizer_offload.value, plan.strategy.precision.value) == ("cpu", "bf16")


def test_a_named_model_is_loaded_in_the_checkpoints_format_unless_said_otherwise() -> None:
    """Llama-3.2-1B whole on a card of 24 GB: it fits as transformers 5 loads it, and not in fp32."""
    settings = {"model": "llama-3.2-1b", "sequence_length": 512, "global_batch_size": 4, "gpus": "1xRTX4090"}
    settings |= {"engine": "native", "gradient_checkpointing": False, "micro_batch_size": 4}
    as_stored = zerofit.plan(**settings)
    assert as_stored.fits
    assert any("weights load in bfloat16" in note for note in as_stored.notes)
    assert as_stored.plan.estimate is not None
    assert 14 < as_stored.plan.estimate.device.peak_bytes / 2**30 < 18
    in_fp32 = zerofit.plan(**settings, dtype="fp32", optimizer="adamw", is_fast=True)
    assert not in_fp32.fits


def test_a_speech_model_takes_the_decoders_longest_text_and_says_so() -> None:
    answer = zerofit.plan(model="whisper-small", global_batch_size=16, gpus="1xRTX4090", is_fast=True)
    plan = answer.plan
    note = "448 tokens of text in each sample, the most that the decoder takes, beside audio of 30 s"
    assert f"{note}: say --seq-len" in answer.notes
    assert "text of 448 tokens" in str(answer)
    assert plan.estimate is not None
    assert plan.estimate.tokens_per_step == 16 * 448


def test_a_model_of_pictures_is_counted_in_images_a_second() -> None:
    answer = zerofit.plan(model="vit-base", global_batch_size=64, gpus="4xRTX4090", is_fast=True)
    assert "images/s" in plan_table(answer)
    plan = answer.plan
    time = plan.estimate.step_time if plan.estimate is not None else None
    assert time is not None
    assert f"  {rate(64 / time.seconds)}  " in plan_table(answer)


@pytest.mark.parametrize(("value", "expected"), [(True, Lora()), (False, None), (Lora(rank=4), Lora(rank=4))])
def test_lora_may_be_a_bool(value: bool | Lora, expected: Lora | None) -> None:
    said = settings_of({"lora": value}).overrides.said.get("lora")
    assert (said and said.value) == expected


@pytest.mark.parametrize(("transformers", "dtype"), [("5.23.0", Precision.BF16), ("4.57.1", Precision.FP32)])
def test_transformers_before_5_loads_weights_in_fp32(transformers: str, dtype: Precision) -> None:
    flags = settings_of({"model": "llama-3.2-1b", "sequence_length": 512}).options
    versions = Versions(python="3", zerofit="0", transformers=transformers)
    assert loaded_format(flags, describe(flags, versions=versions).facts, versions)[0] is dtype


@pytest.mark.parametrize(
    ("size", "asked", "is_told"),
    [
        (3e10, {}, True),
        pytest.param(1e12, {}, True, marks=pytest.mark.slow),
        (5e8, {}, False),
        pytest.param(
            1e12,
            {"model": "llama-2-7b", "global_batch_size": 2, "gpus": "2xT4"},
            False,
            marks=pytest.mark.slow,
        ),  # nor without them
    ],
)
def test_a_files_buckets_that_alone_do_not_fit_are_named(
    size: float, asked: dict[str, Any], is_told: bool, tmp_path: Path
) -> None:
    file = tmp_path / "ds.json"
    zero = {"stage": 2, "reduce_bucket_size": size, "allgather_bucket_size": 5e8}
    file.write_text(json.dumps({"zero_optimization": zero, "bf16": {"enabled": True}}))
    found = zerofit.plan(**{**_MODEL, **asked}, deepspeed_file=str(file))
    line = as_it_is_lines(found)[0]
    assert ("; its buckets take " in line) == is_told, line
    assert ("does not fit" in line) == (size > 1e9)


def test_configuration_files_are_an_anchor_of_the_plan(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    zero = {"stage": 3, "reduce_bucket_size": "auto", "allgather_bucket_size": 1e6}
    file.write_text(json.dumps({"zero_optimization": zero, "fp16": {"enabled": True}}))

    def answer(**said: Any) -> Answer:
        made: Answer = zerofit.plan(**_MODEL, deepspeed_file=str(file), **said)
        return made

    found = answer()
    assert found.as_files_say is not None
    strategy = found.as_files_say.strategy
    assert (strategy.zero_stage, strategy.precision) == (ZeroStage.PARAMETERS, Precision.FP16)
    assert (strategy.buckets.reduce_bucket_size, strategy.buckets.allgather_bucket_size) == (768**2, 10**6)
    assert as_it_is_lines(found)[0].startswith(f"as your files say ({file}): ZeRO-3, ")
    assert as_it_is_lines(answer(zero_stage=1))[0].startswith(
        f"as your files ({file}) and --zero-stage say: ZeRO-1, "
    )
    assert answer(engine="native").as_files_say is None
