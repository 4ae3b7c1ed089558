"""Errors of probe_model for a model that it can't find, read or plan for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from zerofit.core.errors import UserError
from zerofit.models.find import probe_model
from zerofit.models.task import Task


@pytest.fixture(autouse=True)
def _place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty folder to stand in, an empty hub cache, and a hub that must not be asked."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)


def _message(text: str, **options: Any) -> str:
    with pytest.raises(UserError) as raised:
        probe_model(text, **options)
    return str(raised.value)


def _write(files: dict[str, Any]) -> None:
    for name, content in files.items():
        path = Path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        (
            "lama-3-8b",
            [
                "error[model-unknown]: no such model",
                "found: --model lama-3-8b: no folder, none of the 153 models of the catalog "
                "(`zerofit models`), not in the hub's cache",
                "why:   HF_HUB_OFFLINE is set, so the hub was not asked",
                "fix:   --model llama-3-8b or llama-3.1-8b or llama-3-70b, if that was meant; else name a "
                "folder with a config.json, or a hub id while the hub can be reached",
            ],
        ),
        (
            "not an id",
            [
                "error[model-unknown]: no such model",
                "found: --model not an id: no folder, none of the 153 models of the catalog "
                "(`zerofit models`), not in the hub's cache",
                "why:   it is not a valid hub id either",
                "fix:   name a folder with a config.json, or a hub id while the hub can be reached",
            ],
        ),
        (
            "./out/model",
            [
                "error[model-path-missing]: there is no such folder or file",
                "found: --model ./out/model; . exists",
                "why:   it looks like a path, so the hub was not asked",
                "fix:   fix the path, or name a model as ORGANISATION/NAME",
            ],
        ),
    ],
)
def test_an_unknown_model(text: str, lines: list[str]) -> None:
    assert _message(text).split("\n  ") == lines


@pytest.mark.parametrize(
    ("files", "lines"),
    [
        (
            {"m/notes.txt": "", "m/checkpoint-10/config.json": {}},
            [
                "error[model-folder-without-config]: this folder has no config.json",
                "found: --model m, with checkpoint-10, notes.txt in it",
                "why:   config.json contains the model's dimensions",
                "fix:   name m/checkpoint-10",
            ],
        ),
        (
            {f"m/{number}.bin": "" for number in range(8)},
            [
                "error[model-folder-without-config]: this folder has no config.json",
                "found: --model m, with 0.bin, 1.bin, 2.bin, 3.bin, 4.bin, 5.bin and 2 more in it",
                "why:   config.json contains the model's dimensions",
                "fix:   name a folder written by save_pretrained, or the model's hub id",
            ],
        ),
        (
            {"m/adapter_config.json": {"base_model_name_or_path": "meta-llama/Llama-2-7b-hf"}},
            [
                "error[model-is-adapter]: this folder contains an adapter (LoRA or similar), not a model",
                "found: --model m, with adapter_config.json in it",
                "why:   an adapter is trained on top of its base model, which determines the memory",
                "fix:   --model meta-llama/Llama-2-7b-hf",
            ],
        ),
        (
            {"m/config.json": '{"model_type": "llama",\n  "hidden_size": }'},
            [
                "error[model-config-not-json]: the model's config is not JSON",
                "found: m/config.json: Expecting value: line 2 column 18 (char 41)",
                "why:   its dimensions are read from a config.json",
                "fix:   fix the file, or download it again; for a weights file, name its folder",
            ],
        ),
        (
            {"m/config.json": {"hidden_size": 8}},
            [
                "error[model-config-without-type]: the model's config does not name its model type",
                'found: m/config.json without "model_type"',
                "why:   transformers needs it to choose the class",
                'fix:   add "model_type", such as "llama", or name the config.json of a transformers model',
            ],
        ),
        (
            {"m/config.json": {"model_type": "llama", "quantization_config": {"quant_method": "aqlm"}}},
            [
                "error[model-quantized]: this checkpoint is quantized, in a format that is not known",
                "found: quantization_config (aqlm) in m/config.json",
                "why:   the size of its weights differs from the model's",
                "fix:   name the original model",
            ],
        ),
        (
            {"m/config.json": {"model_type": "llama", "quantization_config": {"quant_method": "gptq"}}},
            [
                "error[model-quantized]: this checkpoint is quantized, which only plans of training take",
                "found: quantization_config (gptq) in m/config.json",
                "why:   the size of its weights differs from the model's",
                "fix:   name the original model",
            ],
        ),
    ],
)
def test_a_folder_that_holds_no_model_to_plan_for(files: dict[str, Any], lines: list[str]) -> None:
    _write(files)
    assert _message("m").split("\n  ") == lines


def test_a_family_that_the_installed_transformers_lacks() -> None:
    import transformers

    _write({"m/config.json": {"model_type": "lllama"}})
    assert _message("m").split("\n  ")[:2] == [
        "error[model-type-unknown]: the installed transformers has no model of type lllama",
        f'found: "model_type": "lllama" in the config of m; transformers {transformers.__version__}; '
        "near: llama",
    ]


def test_a_value_that_transformers_refuses() -> None:
    _write({"m/config.json": {"model_type": "llama", "rms_norm_eps": "small"}})
    headline, found, *_ = _message("m").split("\n  ")
    assert headline == "error[model-config-refused]: transformers refuses this config"
    assert "rms_norm_eps" in found


@pytest.mark.parametrize("asked", ["is_dir", "is_file", "read_text"])
def test_a_folder_that_may_not_be_entered(monkeypatch: pytest.MonkeyPatch, asked: str) -> None:
    def refuse(path: Path, *_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    _write({"m/config.json": {"model_type": "llama"}})
    monkeypatch.setattr(Path, asked, refuse)
    headline, found, *_ = _message("m").split("\n  ")
    assert headline == "error[model-config-unreadable]: the model's config can't be read"
    assert found.endswith(": Permission denied")


def test_a_task_that_the_family_has_no_class_for() -> None:
    assert _message("gpt2", task=Task.IMAGE_CLASSIFICATION).split("\n  ") == [
        "error[model-task-unknown]: transformers has no class for this model and task",
        "found: --model gpt2 --task image-classification, of type gpt2",
        "why:   its family has causal-lm, sequence-classification, token-classification, question-answering",
        "fix:   --task causal-lm, or another of these",
    ]


def _hub_error(kind: str) -> Exception:
    from huggingface_hub import errors

    error_type = getattr(errors, kind)
    error: Exception = error_type.__new__(error_type)
    return error


@pytest.mark.parametrize(
    ("kind", "rule", "why"),
    [
        ("RepositoryNotFoundError", "model-unknown", "the hub has no such repository, or it is private"),
        ("GatedRepoError", "model-gated", "its licence must be accepted first"),
        (
            "RemoteEntryNotFoundError",
            "model-folder-without-config",
            "config.json contains the model's dimensions; adapters, pipelines and GGUF files have none",
        ),
    ],
)
def test_what_the_hub_answers(kind: str, rule: str, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def answer(url: str) -> None:
        raise _hub_error(kind)

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", answer)
    with pytest.raises(UserError) as raised:
        probe_model("me/mine")
    assert (raised.value.rule, raised.value.why) == (rule, why)


def test_a_network_that_is_down(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub import constants

    def answer(url: str) -> None:
        raise ConnectionError("name or service not known")

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", answer)
    with pytest.raises(UserError) as raised:
        probe_model("me/mine")
    assert raised.value.why == "the hub could not be reached (ConnectionError: name or service not known)"
