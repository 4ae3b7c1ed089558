"""Files that an export writes have the modes of the umask, as those of save_pretrained() in a script have."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from zerofit.launching.export import export


@pytest.mark.parametrize("umask", [0o022, 0o002, 0o027, 0o077, 0o007])
def test_an_export_can_be_read_by_whom_the_umask_lets(umask: int, tmp_path: Path) -> None:
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    checkpoint = tmp_path / "checkpoint-1"
    sizes = {"n_layer": 1, "n_head": 1, "n_embd": 8, "n_positions": 8, "vocab_size": 16}
    tokens = {"bos_token_id": 0, "eos_token_id": 0}
    GPT2LMHeadModel(GPT2Config(**sizes, **tokens)).save_pretrained(checkpoint)
    (checkpoint / "trainer_state.json").write_text('{"global_step": 1}')
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
        torch.save({}, checkpoint / name)
    (checkpoint / "tokenizer_config.json").write_text("{}")
    (checkpoint / "tokenizer_config.json").chmod(0o600)
    before = os.umask(umask)
    try:
        written = export(checkpoint, tmp_path / "out").folder
        left = os.umask(umask)
    finally:
        os.umask(before)
    assert left == umask
    modes = {path.name: path.stat().st_mode & 0o777 for path in written.iterdir()}
    assert {"model.safetensors", "config.json", "tokenizer_config.json"} <= modes.keys()
    assert set(modes.values()) == {0o666 & ~umask}
