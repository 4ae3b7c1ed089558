"""What explain says beyond a failure's kind: the argument that a library refuses, and what replaced it."""

from __future__ import annotations

import io

import pytest

from zerofit.launching.explain import explain_bytes

_SPAWNED = """\
Traceback (most recent call last):
  File "/env/lib/python3.11/site-packages/torch/multiprocessing/spawn.py", line 119, in join
    raise Exception(msg)
{raised}

-- Process 3 terminated with the following error:
Traceback (most recent call last):
  File "/env/lib/python3.11/site-packages/torch/multiprocessing/spawn.py", line 20, in _wrap
    fn(i, *args)
  File "/home/u/train.py", line 61, in step
    total.add_(loss)
RuntimeError: expected device cuda:3 but got device cpu
"""


@pytest.mark.parametrize(
    ("message", "begins"),
    [
        (
            "TrainingArguments.__init__() got an unexpected keyword argument 'evaluation_strategy'",
            "write eval_strategy in place of evaluation_strategy in TrainingArguments(); pip show ",
        ),
        (
            "Seq2SeqTrainingArguments.__init__() got an unexpected keyword argument 'no_cuda'",
            "write use_cpu in place of no_cuda in Seq2SeqTrainingArguments(); ",
        ),
        (
            "SFTTrainer.__init__() got an unexpected keyword argument 'tokenizer'",
            "write processing_class in place of tokenizer in SFTTrainer(); ",
        ),
        (
            "DPOConfig.__init__() got an unexpected keyword argument 'max_len'. Did you mean 'max_length'?",
            "write max_length in place of max_len in DPOConfig(); ",
        ),
        ("Net.__init__() got an unexpected keyword argument 'tokenizer'", "pip show transformers "),
        ("collate() takes 1 positional arguments but 2 were given", "pip show transformers "),
        (
            "BertModel.forward() got an unexpected keyword argument 'labels'",
            "load the model with its head: AutoModelForCausalLM",
        ),
        ("LlamaModel.forward() got an unexpected keyword argument 'ids'", "pip show transformers "),
    ],
)
def test_a_refused_argument_is_named_with_what_replaced_it(message: str, begins: str) -> None:
    cause = explain_bytes(io.BytesIO(f"TypeError: {message}\n".encode()), "log").cause
    assert cause is not None
    assert cause.failure.id == "training-argument-unknown"
    assert cause.failure.fix.startswith(begins)


@pytest.mark.parametrize("raised", ["Exception:", "torch.multiprocessing.spawn.ProcessRaisedException:"])
def test_the_error_of_a_spawned_rank_is_the_cause_and_not_that_it_ended(raised: str) -> None:
    cause = explain_bytes(io.BytesIO(_SPAWNED.format(raised=raised).encode()), "log").cause
    assert cause is not None
    assert (cause.failure.id, cause.frame) == ("different-devices", "/home/u/train.py:61")
