"""Who raised an exception: the frames of a traceback, and what they say about its cause."""

from __future__ import annotations

import io

import pytest

from zerofit.launching.explain import LoggedFailure, explain_bytes
from zerofit.launching.frames import Frame, frame_in

_LIBRARIES = "/opt/env/lib/python3.11/site-packages"


def _cause(log: str) -> LoggedFailure:
    found = explain_bytes(io.BytesIO(log.encode()), "log").cause
    assert found is not None
    return found


def _traceback(exception: str, *frames: tuple[str, str, str], rank: int | None = None) -> str:
    """Return a traceback: files, functions and source of its frames, outermost first."""
    lines = [
        "Traceback (most recent call last):",
        '  File "/home/me/run.py", line 9, in <module>',
        "    main()",
    ]
    for path, function, source in frames:
        lines += [f'  File "{path}", line 40, in {function}', *([f"    {source}"] if source else [])]
    prefix = "" if rank is None else f"[rank{rank}]: "
    return "".join(f"{prefix}{line}\n" for line in (*lines, exception))


@pytest.mark.parametrize(
    ("text", "path", "line", "function"),
    [
        ('  File "/home/me/a.py", line 12, in f', "/home/me/a.py", 12, "f"),
        ('  File "a.py", line 3', "a.py", 3, ""),
        ("│ /home/me/a.py:7 in <module>        │", "/home/me/a.py", 7, "<module>"),
        ("File ~/env/lib/x.py:88, in C.f(self)", "~/env/lib/x.py", 88, ""),
        ("/usr/lib/x.py in f(self, batch)", "/usr/lib/x.py", None, "f"),
        ("<ipython-input-3-1f0> in <module>", "<ipython-input-3-1f0>", None, "<module>"),
    ],
)
def test_frames_of_python_rich_and_ipython(text: str, path: str, line: int | None, function: str) -> None:
    frame = frame_in(text)
    assert frame is not None
    assert (frame.path, frame.line, frame.function) == (path, line, function)


@pytest.mark.parametrize("text", ["    main()", "10%|#  | 3/30", "RuntimeError: x.py in trouble", ""])
def test_other_lines_are_no_frames(text: str) -> None:
    assert frame_in(text) is None


@pytest.mark.parametrize(
    ("path", "module", "package"),
    [
        (f"{_LIBRARIES}/deepspeed/ops/adam/cpu_adam.py", "deepspeed/ops/adam/cpu_adam.py", "deepspeed"),
        ("C:\\env\\Lib\\site-packages\\torch\\optim\\adam.py", "torch/optim/adam.py", "torch"),
        ("/usr/lib/python3/dist-packages/yaml/__init__.py", "yaml/__init__.py", "yaml"),
        ("/usr/lib/python3.11/json/decoder.py", "Python/json/decoder.py", "Python"),
        ("<frozen os>", "Python/", "Python"),
        ("/home/me/transformers/src/transformers/trainer.py", "transformers/trainer.py", "transformers"),
        ("/src/DeepSpeed/deepspeed/runtime/engine.py", "deepspeed/runtime/engine.py", "deepspeed"),
        ("/src/Megatron-LM-main/megatron/training.py", "megatron/training.py", "megatron"),
        ("/home/me/train.py", None, None),
        ("/home/me/torch/train.py", None, None),
        ("<ipython-input-3-1f0>", None, None),
    ],
)
def test_module_and_package_of_a_frame(path: str, module: str | None, package: str | None) -> None:
    frame = Frame(path=path, line=1)
    assert frame.package == package
    assert frame.module == module if module != "Python/" else str(frame.module).startswith(module)


@pytest.mark.parametrize(
    ("exception", "frame", "source", "failure"),
    [
        (
            "KeyError: 'betas'",
            "torch/optim/adamw.py in step",
            "beta1, beta2 = group['betas']",
            "optimizer-state-mismatch",
        ),
        (
            "KeyError: 'exp_avg_sq'",
            "bitsandbytes/optim/adamw.py in update_step",
            "",
            "optimizer-state-mismatch",
        ),
        ("KeyError: 'step'", "deepspeed/ops/adam/fused_adam.py in step", "", "optimizer-state-mismatch"),
        (
            "KeyError: 'max_exp_avg'",
            "/home/me/optim/lamb.py in step",
            "state['max_exp_avg']",
            "optimizer-state-mismatch",
        ),
        (
            "KeyError: 'text'",
            "/home/me/prep.py in tokenize",
            "return tokenizer(rows['text'])",
            "column-missing",
        ),
        (
            "KeyError: 'answer'",
            "/home/me/qa_dataset.py in __getitem__",
            "self.items[i]['answer']",
            "sample-key-missing",
        ),
        ("KeyError: 'labels'", "/home/me/rows.py in __iter__", "yield row['labels']", "sample-key-missing"),
        ("KeyError: 'input_ids'", "/home/me/rows.py in __getitems__", "", "sample-key-missing"),
        ("KeyError: 'pixel_values'", "/home/me/views.py in __getitem__", "return v[k]", "sample-key-missing"),
        ("KeyError: 17", "/home/me/scenes.py in __getitem__", "self.index[i]", "sample-key-missing"),
        ("KeyError: 'labels'", "/home/me/fit.py in collate", "row['labels']", "column-missing"),
        (
            "AttributeError: 'Scenes' object has no attribute 'paths'",
            "/home/me/scenes.py in __len__",
            "return len(self.paths)",
            "own-attribute",
        ),
        (
            "AttributeError: 'Head' object has no attribute 'scale'",
            "/home/me/heads.py in forward",
            "x = x * self.scale.exp()",
            "own-attribute",
        ),
        (
            "AttributeError: 'Args' object has no attribute 'lr'. Did you mean: 'lrs'?",
            "/home/me/args.py in as_dict",
            'return {"lr": self.lr}',
            "own-attribute",
        ),
        (
            "AttributeError: 'Rollout' object has no attribute '_queue'",
            "/home/me/rollout.py in __del__",
            "self._queue.close()",
            "own-attribute",
        ),
        (
            "AttributeError: 'Mixer' object has no attribute 'seed'",
            "/home/me/mix.py in draw",
            "random.Random(self.seed + self.epoch)",
            "own-attribute",
        ),
        (
            "AttributeError: 'NoneType' object has no attribute 'grad_fn'",
            "/home/me/fit.py in step",
            "self.loss.grad_fn",
            "attribute-missing",
        ),
        (
            "AttributeError: 'Trainer' object has no attribute 'tokenizer'",
            "/home/me/fit.py in save",
            "trainer.tokenizer.save_pretrained(out)",
            "attribute-missing",
        ),
        (
            "AttributeError: 'LlamaConfig' object has no attribute 'rope_scaling'",
            "transformers/models/llama/modeling_llama.py in __init__",
            "self.rope_scaling",
            "attribute-missing",
        ),
        (
            "AttributeError: 'DistributedDataParallel' object has no attribute 'config'",
            "torch/nn/modules/module.py in __getattr__",
            "raise AttributeError(",
            "wrapped-attribute",
        ),
        (
            "AttributeError: 'DeepSpeedEngine' object has no attribute 'generate_reply'",
            "deepspeed/runtime/engine.py in __getattr__",
            "",
            "wrapped-attribute",
        ),
        (
            "AttributeError: 'FullyShardedDataParallel' object has no attribute 'peft_config'",
            "torch/nn/modules/module.py in __getattr__",
            "",
            "wrapped-attribute",
        ),
        ("AttributeError: 'DataParallel' object has no attribute 'encode'", "", "", "wrapped-attribute"),
        ("AttributeError: 'OptimizedModule' object has no attribute 'save'", "", "", "wrapped-attribute"),
        ("ZeroDivisionError: division by zero", "trl/trainer/sft_trainer.py in train", "", "empty-data"),
        (
            "ZeroDivisionError: integer modulo by zero",
            "verl/trainer/fsdp_sft_trainer.py in fit",
            "epoch = step // self.steps_per_epoch",
            "empty-data",
        ),
        (
            "ZeroDivisionError: float division by zero",
            "torch/optim/lr_scheduler.py in get_lr",
            "",
            "unknown-exception",
        ),
        ("KeyError: 'caption'", "datasets/formatting/formatting.py in __getitem__", "", "column-missing"),
        ("KeyError: 'image'", "", "", "column-missing"),
        (
            "KeyError: 'model'",
            "/home/me/load.py in restore",
            "net.load_state_dict(ckpt['model'])",
            "weights-do-not-fit",
        ),
        (
            "KeyError: 'mamba9'",
            "transformers/models/auto/configuration_auto.py in __getitem__",
            "",
            "library-version",
        ),
        ("KeyError: 'v_head'", "/home/me/heads.py in build", "return HEADS[name]", "unknown-exception"),
        ("KeyError: 139821", "apex/parallel/distributed.py in allreduce_hook", "", "unknown-exception"),
        ("KeyError: 'reward'", "peft/tuners/tuners_utils.py in inject_adapter", "", "unknown-exception"),
        (
            "IndexError: list index out of range",
            "deepspeed/runtime/zero/stage3.py in initialize_optimizer_states",
            "",
            "no-trained-parameters",
        ),
        (
            "IndexError: list index out of range",
            "deepspeed/runtime/zero/stage3.py in independent_gradient_partition_epilogue",
            "",
            "unknown-exception",
        ),
        (
            "IndexError: index 9 is out of bounds for axis 0 with size 9",
            "/home/me/prep.py in pick",
            "ids[9]",
            "index-out-of-range",
        ),
        (
            "IndexError: index 5 is out of bounds for dimension 0 with size 5",
            "vllm/worker/model_runner.py in run",
            "",
            "unknown-exception",
        ),
        (
            "StopIteration",
            "torch/utils/data/dataloader.py in _next_data",
            "raise StopIteration",
            "data-exhausted",
        ),
        ("StopIteration", "deepspeed/runtime/dataloader.py in __next__", "", "data-exhausted"),
        ("StopIteration", "/home/me/loop.py in run", "batch = next(batches)", "data-exhausted"),
        (
            "StopIteration",
            "transformers/modeling_bert.py in forward",
            "next(self.parameters())",
            "unknown-exception",
        ),
        ("StopIteration", "/home/me/net.py in device", "next(self.parameters()).device", "unknown-exception"),
        (
            "ValueError: max() arg is an empty sequence",
            "deepspeed/runtime/zero/stage3.py in __init__",
            "",
            "no-trained-parameters",
        ),
        (
            "ValueError: max() arg is an empty sequence",
            "/home/me/metrics.py in best",
            "max(losses)",
            "unknown-exception",
        ),
        (
            "AssertionError",
            "torch/distributed/checkpoint/state_dict_loader.py in local_step",
            "",
            "resume-missing",
        ),
        (
            "AssertionError: odd",
            "/home/me/net.py in forward",
            "assert x.ndim == 3, 'odd'",
            "script-assertion",
        ),
        ("AssertionError: timer has begun", "deepspeed/utils/timer.py in start", "", "unknown-exception"),
        (
            "ZeroDivisionError: division by zero",
            "megatron/core/scheduler.py in step",
            "",
            "unknown-exception",
        ),
    ],
)
def test_the_raising_frame_decides_what_an_exception_means(
    exception: str, frame: str, source: str, failure: str
) -> None:
    path, _, function = frame.partition(" in ")
    place = path if path.startswith("/") else f"{_LIBRARIES}/{path}"
    log = _traceback(exception, (place, function, source)) if frame else f"{exception}\n"
    assert _cause(log).failure.id == failure
    if frame:
        assert _cause(_traceback(exception, (place, function, source), rank=3)).failure.id == failure


@pytest.mark.parametrize(
    ("frames", "cause", "part_of_why"),
    [
        (
            [("/home/me/net.py", "f", "x()")],
            "the script raised OddError",
            "most likely the script or its data",
        ),
        (
            [(f"{_LIBRARIES}/deepspeed/runtime/engine.py", "step", "")],
            "deepspeed raised OddError",
            "deepspeed/runtime/engine.py, which /home/me/run.py:9 called",
        ),
        (
            [(f"{_LIBRARIES}/datasets/builder.py", "_prepare", "")],
            "datasets raised OddError",
            "could not handle the data",
        ),
        (
            [(f"{_LIBRARIES}/megatron/core/x.py", "f", ""), ("/usr/lib/python3.11/copy.py", "deepcopy", "")],
            "megatron raised OddError",
            "megatron/core/x.py",
        ),
        (
            [("/home/me/net.py", "f", ""), ("/usr/lib/python3.11/copy.py", "deepcopy", "")],
            "the script raised OddError",
            "most likely the script",
        ),
        (
            [("/home/me/net.py", "f", ""), ("/usr/lib/python3.11/subprocess.py", "run", "")],
            "the script raised OddError",
            "most likely the script",
        ),
        (
            [
                (f"{_LIBRARIES}/torch/utils/data/dataloader.py", "_process_data", ""),
                (f"{_LIBRARIES}/torch/_utils.py", "reraise", ""),
            ],
            "torch raised OddError",
            "torch/utils/data/dataloader.py could not handle the data",
        ),
        (
            [(f"{_LIBRARIES}/accelerate/accelerator.py", "backward", ""), ("/home/me/net.py", "hook", "")],
            "the script raised OddError",
            "most likely the script",
        ),
    ],
)
def test_an_unknown_exception_is_that_of_the_package_that_raised_it(
    frames: list[tuple[str, str, str]], cause: str, part_of_why: str
) -> None:
    found = _cause(_traceback("my.OddError: no", *frames))
    assert (found.failure.id, found.failure.cause) == ("unknown-exception", cause)
    assert part_of_why in found.failure.why


@pytest.mark.parametrize(
    ("said", "tells"),
    [
        ("the rewards (3) must be divisible by 2", True),
        ("The batch (7 x 1) must be divisible. The valid values for the group are: [7].", True),
        ("Please set `MAGIC` to 1 or 2", True),
        ("this scheduler can only step once", False),
        ("You can't pack here: use `padding_free` instead", True),
        ("`group` has to be a tuple", True),
        ("Please file an issue", False),
        ("index 9 of 4", False),
    ],
)
def test_an_unknown_exception_may_say_itself_what_to_do(said: str, tells: bool) -> None:
    found = _cause(_traceback(f"ValueError: {said}", (f"{_LIBRARIES}/trl/trainer/own.py", "check", "raise")))
    assert (found.failure.id, found.failure.fix == "do what the message says") == ("unknown-exception", tells)


@pytest.mark.parametrize(
    ("line", "failure"),
    [
        ("RuntimeError: CUDA error: unknown error", "cuda-error"),
        ("RuntimeError: CUDA error: operation not permitted when stream is capturing", "cuda-error"),
        ("torch.AcceleratorError: CUDA error: invalid configuration argument", "cuda-error"),
        ("RuntimeError: CUDA driver error: invalid argument", "cuda-error"),
        ("RuntimeError: HIP error: invalid kernel file", "cuda-error"),
        ("  what():  CUDA error: unknown error", "cuda-error"),
        ("RuntimeError: cuda runtime error (30) : unknown error at /x/THCGeneral.cpp:50", "cuda-error"),
        ("RuntimeError: CUDA error: out of memory", "gpu-out-of-memory"),
        ("RuntimeError: CUDA error: invalid device ordinal", "invalid-device-ordinal"),
        (
            "RuntimeError: CUDA error: Invalid access of peer GPU memory over nvlink or a hardware error",
            "gpu-hardware",
        ),
        ("RuntimeError: CUDA error: unspecified launch failure", "illegal-memory-access"),
    ],
)
def test_an_unknown_cuda_error_is_of_hardware_or_a_kernel(line: str, failure: str) -> None:
    found = _cause(
        line if line.startswith(" ") else _traceback(line, ("/home/me/dataset.py", "batch", "x.cuda()"))
    )
    assert found.failure.id == failure
    assert "data set" not in found.failure.cause


@pytest.mark.parametrize(
    ("log", "frame", "failure"),
    [
        (
            "╭──────── Traceback (most recent call last) ────────╮\n"
            "│ /home/me/fit.py:30 in <module>                    │\n"
            "│ ❱ 30 fit()                                        │\n"
            f"│ {_LIBRARIES}/torch/optim/sgd.py:80 in step        │\n"
            "╰───────────────────────────────────────────────────╯\n"
            "KeyError: 'nesterov'\n",
            "/home/me/fit.py:30",
            "optimizer-state-mismatch",
        ),
        (
            "KeyError                 Traceback (most recent call last)\n"
            "Cell In[4], line 3\n"
            "      1 model = build()\n"
            "----> 3 model.step()\n\n"
            f"File {_LIBRARIES}/torch/optim/sgd.py:80, in SGD.step(self)\n"
            "     79 for group in self.param_groups:\n"
            "---> 80     group['nesterov']\n\n"
            "KeyError: 'nesterov'\n",
            f"{_LIBRARIES}/torch/optim/sgd.py:80",
            "optimizer-state-mismatch",
        ),
        (
            "KeyError                 Traceback (most recent call last)\n"
            "<ipython-input-2-0a1> in <module>\n"
            "----> 1 rows['label']\n\n"
            "KeyError: 'label'\n",
            "<ipython-input-2-0a1>",
            "column-missing",
        ),
        (
            "IndexError: Caught IndexError in DataLoader worker process 1.\n"
            "Original Traceback (most recent call last):\n"
            '  File "/home/me/data.py", line 8, in __getitem__\n'
            "    return self.rows[i]\n"
            "IndexError: index 3 is out of bounds for axis 0 with size 3\n",
            "/home/me/data.py:8",
            "index-out-of-range",
        ),
        (
            'E     File "/home/me/env/lib/python3.11/site-packages/torch/optim/adam.py", line 9, in step\n'
            "E       state['step']\n"
            "E   KeyError: 'step'\n",
            "/home/me/env/lib/python3.11/site-packages/torch/optim/adam.py:9",
            "optimizer-state-mismatch",
        ),
    ],
    ids=["rich", "ipython", "old ipython", "worker", "pytest"],
)
def test_tracebacks_of_other_programs(log: str, frame: str, failure: str) -> None:
    found = _cause(log)
    assert (found.failure.id, found.frame) == (failure, frame)
