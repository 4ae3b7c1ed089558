"""Presets: their names, and the message for a name that is none of them."""

from __future__ import annotations

import re

import pytest

from zerofit.checking.engine import check
from zerofit.checking.inputs.strategy import situation_of_strategy
from zerofit.checking.rules import ALL_RULES
from zerofit.core.errors import UserError
from zerofit.core.plan import Topology
from zerofit.core.presets import PRESETS, Preset, find_preset
from zerofit.core.strategy import Engine


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("z3-offload", "z3-offload"),
        ("z3_offload", "z3-offload"),
        ("Z3-Offload", "z3-offload"),
        ("ds_z3_offload", "z3-offload"),
        ("ds_z3_offload.json", "z3-offload"),
        ("z1", "z1"),
        ("ds_z3_offload_optimizer.json", "z3-offload-optimizer"),
        ("fsdp2_qlora", "fsdp2-qlora"),
        ("accelerate_fsdp2_offload.yaml", "fsdp2-offload"),
    ],
)
def test_a_preset_is_found_by_name_and_by_file(written: str, name: str) -> None:
    assert find_preset(written).name == name


@pytest.mark.parametrize("preset", PRESETS, ids=lambda preset: preset.name)
def test_a_preset_is_found_by_each_of_its_own_names(preset: Preset) -> None:
    assert find_preset(preset.name) is preset
    assert find_preset(preset.accelerate_file) is preset
    assert preset.deepspeed_file is None or find_preset(preset.deepspeed_file) is preset


@pytest.mark.parametrize(
    ("written", "fix"),
    [
        ("z3-ofload", "did you mean --preset z3-offload?"),
        ("z3-nvm", "did you mean --preset z3-nvme?"),
        ("z3_inferense", "did you mean --preset z3-inference?"),
        ("zero3", "name one of them"),
        ("fsdp", "did you mean --preset fsdp2?"),
        ("fsdp2-ofload", "did you mean --preset fsdp2-offload?"),
        ("", "name one of them"),
    ],
)
def test_an_unknown_preset_is_named_beside_the_nearest(written: str, fix: str) -> None:
    with pytest.raises(UserError) as error:
        find_preset(written)
    assert str(error.value) == (
        f"error[unknown-preset]: there is no preset {written!r}\n"
        f"  found: --preset {written}\n"
        "  why:   the presets are z1, z2, z2-offload, z3, z3-offload-optimizer, z3-offload, z3-nvme, "
        "z3-inference, fsdp2, fsdp2-offload, fsdp2-qlora\n"
        f"  fix:   {fix}"
    )


def test_file_names_are_those_of_the_ecosystem() -> None:
    files = {preset.name: (preset.deepspeed_file, preset.accelerate_file) for preset in PRESETS}
    assert files["z3-offload"] == ("ds_z3_offload.json", "accelerate_z3_offload.yaml")
    assert len(set(files.values())) == len(PRESETS)


@pytest.mark.parametrize("preset", PRESETS, ids=lambda preset: preset.name)
def test_a_preset_breaks_no_rule_and_leaves_the_script_its_own(preset: Preset) -> None:
    situation = situation_of_strategy(preset.strategy, topology=Topology(world_size=2))
    assert check(situation, rules=ALL_RULES).findings == ()
    strategy = preset.strategy
    assert strategy.engine is (Engine.FSDP2 if preset.deepspeed_file is None else Engine.DEEPSPEED)
    assert (strategy.precision, strategy.micro_batch_size, strategy.gradient_clipping) == (None, None, None)


@pytest.mark.parametrize("preset", PRESETS, ids=lambda preset: preset.name)
def test_a_preset_says_what_a_person_needs_to_pick_it(preset: Preset) -> None:
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", preset.name)
    assert all((preset.title, preset.gpu_bytes_per_parameter, preset.fits, preset.costs, preset.not_with))
