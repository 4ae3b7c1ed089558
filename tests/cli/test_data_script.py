"""zerofit data on a training script: the lengths of the samples that it trains on, through a real capture."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from captures import LOOP
from runs import RunZerofit

from zerofit.core.capture import Capture, CapturedLengths, capture_from_json, capture_to_json, for_plan

_SCRIPT = """
import sys
import torch
from accelerate import Accelerator
from transformers import GPT2Config, GPT2LMHeadModel

lengths = [3 + number % int(sys.argv[2]) for number in range(200)]

def collate(samples):
    rows = [torch.tensor(one["input_ids"]) for one in samples]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": ids}

samples = [{"input_ids": [1 + place % 50 for place in range(length)]} for length in lengths]
loader = torch.utils.data.DataLoader(samples, batch_size=4, shuffle=True, collate_fn=collate)
model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=64, n_positions=64))
accelerator = Accelerator()
model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters()), loader)
for batch in loader:
    accelerator.backward(model(**batch).loss)
    optimizer.step()
    optimizer.zero_grad()
    open("trained", "w")
"""


def test_a_script_is_reported_by_the_samples_that_it_trains_on(
    zerofit_fork: RunZerofit, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(_SCRIPT)
    environment = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "CUDA_VISIBLE_DEVICES": ""}
    line = "data --json train.py --spread 20 --json"  # what stands behind the script is the script's
    finished = zerofit_fork(*line.split(), cwd=tmp_path, environment=environment)
    assert finished.returncode == 0, finished.stderr
    document = json.loads(finished.stdout)
    assert document["histogram"] == [[length, 10] for length in range(3, 23)]
    assert (document["batch_size"], document["is_causal"], document["is_whole"]) == (4, True, True)
    assert document["source"] == "train.py"
    assert [row["way"] for row in document["padding"]] == ["fixed", "dynamic", "bucketed", "packed"]
    assert not (tmp_path / "trained").exists()


def _with_counts() -> Capture:
    lengths = CapturedLengths(
        num_samples=3, is_whole=True, p50=5, p90=9, p99=9, longest=9, counts=((5, 2), (9, 1))
    )
    return replace(LOOP, lengths=lengths)


def test_a_capture_keeps_its_counts_and_a_plan_leaves_them_out() -> None:
    capture = _with_counts()
    read = capture_from_json(capture_to_json(capture), name="capture.json")
    assert read.lengths == capture.lengths
    planned = for_plan(capture).lengths
    assert planned is not None
    assert (planned.counts, planned.p90) == ((), 9)


def test_a_capture_of_before_can_be_read() -> None:
    document = json.loads(capture_to_json(_with_counts()))
    del document["lengths"]["counts"]
    read = capture_from_json(json.dumps(document), name="capture.json")
    assert read.lengths is not None
    assert read.lengths.counts == ()
