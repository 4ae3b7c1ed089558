"""Loading a generation job's model: what transformers can't load is an error in words."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import torch
from generate_runs import make_model
from safetensors.torch import load_file, save_file

from zerofit.core.errors import UserError
from zerofit.generation.generation_job import GenerationJob
from zerofit.generation.loading import load_model

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def _other_width(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "n_embd": 64}))


def _cut_weights(model: Path) -> None:
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-500])


def _cut_legacy(model: Path) -> None:
    file = model / "pytorch_model.bin"
    torch.save(load_file(model / "model.safetensors"), file, _use_new_zipfile_serialization=False)
    file.write_bytes(file.read_bytes()[:-500])
    (model / "model.safetensors").unlink()


def _without_weights(model: Path) -> None:
    (model / "model.safetensors").unlink()


def _no_config(model: Path) -> None:
    (model / "config.json").write_text("{,")


def _unknown_kind(model: Path) -> None:
    (model / "config.json").write_text(json.dumps({"model_type": "no-such-model"}))


def _other_rank(model: Path) -> None:
    weights = load_file(model / "model.safetensors")
    weights["transformer.wpe.weight"] = torch.zeros(3)
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})


def _job(model: Path) -> GenerationJob:
    return GenerationJob(
        model=str(model),
        tokenizer=str(model),
        prompts="prompts.jsonl",
        out="out.jsonl",
        fingerprint="f",
        dtype="float32",
        batch_size=1,
        max_new_tokens=4,
        generation={},
    )


@pytest.mark.parametrize(
    "damage",
    [_other_width, _cut_weights, _cut_legacy, _without_weights, _no_config, _unknown_kind, _other_rank],
)
def test_what_transformers_can_not_load_is_an_error_in_words(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    model = make_model(tmp_path / "model")
    damage(model)
    with pytest.raises(UserError) as caught:
        load_model(_job(model))
    assert (caught.value.rule, caught.value.exit_code) == ("model-not-loaded", 1)
    assert caught.value.found.startswith(f"{model}: ")


def test_memory_that_runs_out_stays_what_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(*_: object, **__: object) -> None:
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")

    model = make_model(tmp_path / "model")
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", no_room)
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        load_model(_job(model))
