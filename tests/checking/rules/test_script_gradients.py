"""The rules on zero_grad() and on fp16 weights: each on small sources, and none where nothing is certain."""

from __future__ import annotations

import pytest
from rule_examples.example import ZERO2_LAUNCH, Example, changed, zero
from rule_situations import situation_of_example

from zerofit.checking.engine import check
from zerofit.checking.rules.script import gradients
from zerofit.core.setting import Confidence

_ACCUMULATES = """\
import argparse
import torch
from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--accumulate-every", "-k", type=int, default=1)
parser.add_argument("--precision", default="no")
args = parser.parse_args()
accelerator = Accelerator(gradient_accumulation_steps=3)
net = nn.Linear(4, 4)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
net, opt, data = accelerator.prepare(net, opt, load())
for epoch in range(args.epochs):
    for x, y in data:
        with accelerator.accumulate(net):
            opt.zero_grad()
            error = (net(x) - y).pow(2).mean()
            accelerator.backward(error)
            opt.step()
"""
_MAKES = "Accelerator(gradient_accumulation_steps=3)"
_PREPARES = "net, opt, data = accelerator.prepare(net, opt, load())"
_CLEARS = "            opt.zero_grad()\n"
_UPDATES = "            opt.step()\n"
_IDS = ("zero-grad-before-backward", "zero-grad-in-each-micro-batch", "fp16-weights-under-grad-scaler")


def _found(example: Example) -> list[tuple[str, Confidence]]:
    findings = check(situation_of_example(example), rules=gradients.RULES).findings
    return [(finding.rule, finding.confidence) for finding in findings]


def _with(old: str, new: str, script: str = _ACCUMULATES) -> str:
    return changed(script, old, new)


def _plugin(keywords: str) -> str:
    return _with(_MAKES, f"Accelerator(gradient_accumulation_plugin=GradientAccumulationPlugin({keywords}))")


def _from(owner: str) -> str:
    """Return the script with a number of steps from the command line."""
    return _with(_MAKES, f"Accelerator(gradient_accumulation_steps={owner})")


_SURE = [(_IDS[0], Confidence.CERTAIN)]
_LIKELY = [(_IDS[0], Confidence.LIKELY)]


@pytest.mark.parametrize(
    ("script", "arguments", "expected"),
    [
        (_ACCUMULATES, "", _SURE),
        (_plugin("num_steps=2"), "", _SURE),
        (_plugin("num_steps=args.accumulate_every"), "--accumulate-every 2", _SURE),
        (_from("args.accumulate_every"), "--accumulate-every=8", _SURE),
        (_with("default=1", "default=16", _from("args.accumulate_every")), "", _SURE),
        (_with(_CLEARS, f"            if accelerator.sync_gradients:\n    {_CLEARS}"), "", _SURE),
        (_with(_CLEARS, "            net.zero_grad(set_to_none=True)\n"), "", _SURE),
        (_with(_UPDATES, f"{_UPDATES}{_CLEARS}"), "", _SURE),
        (_with("torch.optim.SGD(net.parameters(), lr=0.1)", "optimizer_for(net)"), "", _SURE),
        (_with("    for x, y", "    if args.train:\n     for x, y"), "", None),
        (_with(_CLEARS, ""), "", []),
        (_with(_CLEARS, "").replace(_UPDATES, f"{_UPDATES}{_CLEARS}"), "", []),
        (_with(_CLEARS, "").replace("        with acc", "        opt.zero_grad()\n        with acc"), "", []),
        (_with(_MAKES, "Accelerator()"), "", []),
        (_with(_MAKES, "Accelerator(gradient_accumulation_steps=1)"), "", []),
        (_plugin("num_steps=1"), "", []),
        (_plugin("num_steps=steps()"), "", []),
        (_from("args.accumulate_every"), "", []),
        (_from("args.accumulate_every"), "--accumulate-every 1", []),
        (_from("args.accumulate_every"), "--accumulate-every $STEPS", []),
        (_from("args.accumulate_every"), "-k 4", []),
        (_with(_CLEARS, f"            if step % 3 == 0:\n    {_CLEARS}"), "", []),
        (_with(_CLEARS, "            other.zero_grad()\n"), "", []),
        (_with(_PREPARES, "net, data = accelerator.prepare(net, load())"), "", []),
    ],
)  # fmt: skip
def test_zero_grad_in_accumulate(
    script: str, arguments: str, expected: list[tuple[str, Confidence]] | None
) -> None:
    expected = _LIKELY if expected is None else expected
    assert _found(Example(script=script, command="python", arguments=arguments)) == expected


def test_deepspeeds_optimizer_ignores_zero_grad() -> None:
    assert _found(Example(script=_ACCUMULATES, deepspeed=zero(2))) == []
    assert _found(Example(script=_ACCUMULATES, accelerate=ZERO2_LAUNCH)) == []


_BY_HAND = """\
import torch

net = torch.nn.Linear(4, 4)
opt = torch.optim.AdamW(net.parameters())
for number, (x, y) in enumerate(data):
    opt.zero_grad()
    error = (net(x) - y).pow(2).mean() / 4
    error.backward()
    if (number + 1) % 4 == 0:
        opt.step()
"""
_BEFORE = "    opt.zero_grad()\n"
_STEP = "    if (number + 1) % 4 == 0:\n        opt.step()\n"
_NESTED = """\
import torch

net = torch.nn.Linear(4, 4)
opt = torch.optim.AdamW(net.parameters())
for number in range(1000):
    for _ in range(accumulation):
        opt.zero_grad()
        error = (net(batch()) ** 2).mean() / accumulation
        error.backward()
    opt.step()
"""
_GAN = """\
import torch

generator, critic = torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)
opt_g = torch.optim.Adam(generator.parameters())
opt_c = torch.optim.Adam(critic.parameters())
for number, real in enumerate(data):
    opt_g.zero_grad()
    opt_c.zero_grad()
    error = critic(generator(noise())).mean() - critic(real).mean()
    error.backward()
    opt_c.step()
    if number % 5 == 0:
        other = -critic(generator(noise())).mean()
        other.backward()
        opt_g.step()
"""
_SCALER = "scaler = torch.amp.GradScaler()\nfor number"
_SCALED = _with("for number", _SCALER, _BY_HAND)
_SCALED = _with("error.backward", "scaler.scale(error).backward", _SCALED)
_SCALED = _with("opt.step()", "scaler.step(opt)", _SCALED)


def _function(script: str) -> str:
    """Return a script whose loop is in a function that gets the optimizer from its caller."""
    head, loop = script.split("for number", 1)
    body = "".join(f"    {line}\n" for line in f"for number{loop}".splitlines())
    return f"def train(net, opt, data):\n{body}\n{head}train(net, opt, load())\n"


@pytest.mark.parametrize(
    ("script", "confidence"),
    [
        (_BY_HAND, Confidence.CERTAIN),
        (_with(_STEP, f"{_STEP}{_BEFORE}", _with(_BEFORE, "", _BY_HAND)), Confidence.CERTAIN),
        (_with("% 4", "% every", _with("for number", "every = 8\nfor number", _BY_HAND)), Confidence.CERTAIN),
        (_with(" == 0:", " == 0 or number + 1 == len(data):", _BY_HAND), Confidence.CERTAIN),
        (_function(_BY_HAND), Confidence.CERTAIN),
        (_SCALED, Confidence.CERTAIN),
        (_with("% 4", "% args.every", _BY_HAND), Confidence.LIKELY),
        (_with(_BEFORE, "    net.zero_grad()\n", _BY_HAND), Confidence.CERTAIN),
        (_with("torch.optim.AdamW(net.parameters())", "make(net)", _BY_HAND), Confidence.LIKELY),
        (_NESTED, Confidence.LIKELY),
        (_with(_BEFORE, "", _BY_HAND), None),
        (_with(_STEP, f"{_STEP}    {_BEFORE}", _with(_BEFORE, "", _BY_HAND)), None),
        (_with(" == 0:\n        opt.step()", " == 0:\n        save()\n    opt.step()", _BY_HAND), None),
        (_with("% 4", "% 1", _BY_HAND), None),
        (_with("        opt.zero_grad()\n", "", _NESTED), None),
        (_with("    opt.step()", "        opt.step()", _NESTED), None),
        (_with("    opt.step()\n", "    loss(net).backward()\n    opt.step()\n", _NESTED), None),
        (_GAN, None),
    ],
)
def test_zero_grad_with_accumulation_by_hand(script: str, confidence: Confidence | None) -> None:
    assert _found(Example(script=script, command="python")) == (
        [] if confidence is None else [(_IDS[1], confidence)]
    )


_FP16 = """\
import torch
from accelerate import Accelerator
from transformers import AutoModelForSequenceClassification

accelerator = Accelerator(mixed_precision="fp16")
net = AutoModelForSequenceClassification.from_pretrained("bert-base-cased", dtype=torch.float16)
opt = torch.optim.AdamW(net.parameters())
net, opt, data = accelerator.prepare(net, opt, load())
for batch in data:
    accelerator.backward(net(**batch).loss)
    opt.step()
    opt.zero_grad()
"""
_DTYPE = ", dtype=torch.float16"
_OPT = "opt = torch"
_IN_FP32 = _with(_DTYPE, "", _FP16)
_BY_LAUNCHER = _with('mixed_precision="fp16"', "", _FP16)
_FORMAT = """\
kind = torch.float32
if accelerator.mixed_precision == "bf16":
    kind = torch.bfloat16
elif accelerator.mixed_precision == "fp16":
    kind = torch.float16
net.to(accelerator.device, dtype=kind)
opt = torch"""
_CHOICE = 'net.to(torch.float16 if accelerator.mixed_precision == "fp16" else torch.float32)\nopt = torch'
_TRAINER = """\
import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

args = TrainingArguments("out", fp16=True)
net = AutoModelForCausalLM.from_pretrained("gpt2", torch_dtype="float16")
Trainer(model=net, args=args, train_dataset=rows).train()
"""
_HALF_TRAINER = _with("model=net", "model=net.half()", _with(', torch_dtype="float16"', "", _TRAINER))
_SFT = _with("model=net, ", "model=net, peft_config=lora, ", _TRAINER)
_SFT = _with("AutoModelForCausalLM, Trainer, TrainingArguments\n", "AutoModelForCausalLM\n", _SFT)
_SFT = _with(
    "import torch\n", "from trl import SFTConfig as TrainingArguments, SFTTrainer as Trainer\n", _SFT
)
_ADAPTS = "from peft import get_peft_model\nnet = get_peft_model(net, lora)\n"
_CASTS = "for weight in net.parameters():\n    weight.data = weight.data.float()\n"
_TORCH = """\
import torch

net = torch.nn.Linear(4, 4).cuda().half()
opt = torch.optim.SGD(net.parameters(), lr=0.1)
scaler = torch.cuda.amp.GradScaler()
for x in data:
    opt.zero_grad()
    with torch.autocast("cuda"):
        error = net(x).mean()
    scaler.scale(error).backward()
    scaler.step(opt)
    scaler.update()
"""
_LAUNCH_FP16 = "accelerate launch --mixed_precision fp16"


@pytest.mark.parametrize(
    ("script", "command", "confidence"),
    [
        (_FP16, "python", Confidence.CERTAIN),
        (_BY_LAUNCHER, _LAUNCH_FP16, Confidence.CERTAIN),
        (_with(_OPT, f"net.half()\n{_OPT}", _IN_FP32), "python", Confidence.CERTAIN),
        (_with(_OPT, f'net = net.to("cuda", torch.half)\n{_OPT}', _IN_FP32), "python", Confidence.CERTAIN),
        (_with(_OPT, _FORMAT, _IN_FP32), "python", Confidence.CERTAIN),
        (_with(_OPT, _CHOICE, _IN_FP32), "python", Confidence.CERTAIN),
        (_with(_OPT, _FORMAT, _with(_DTYPE, "", _BY_LAUNCHER)), _LAUNCH_FP16, Confidence.CERTAIN),
        (_with("mixed_precision=", "mixed_precision=args.kind or ", _FP16), _LAUNCH_FP16, Confidence.LIKELY),
        (_with(_OPT, f"inspect(net)\n{_OPT}", _FP16), "python", Confidence.LIKELY),
        (_TRAINER, "python", Confidence.CERTAIN),
        (_HALF_TRAINER, "python", Confidence.CERTAIN),
        (_TORCH, "python", Confidence.CERTAIN),
        (_IN_FP32, "python", None),
        (_BY_LAUNCHER, "python", None),
        (_BY_LAUNCHER, "accelerate launch --mixed_precision bf16", None),
        (_FP16, "accelerate launch --use_deepspeed --zero_stage 2", None),
        (_FP16, "accelerate launch --use_fsdp", None),
        (_with(_OPT, _FORMAT, _with(_DTYPE, "", _BY_LAUNCHER)), "python", None),
        (_with(_OPT, f"net.float()\n{_OPT}", _FP16), "python", None),
        (_with(_OPT, f"net.to(torch.float32)\n{_OPT}", _FP16), "python", None),
        (_with(_OPT, f"if args.half:\n    net.half()\n{_OPT}", _IN_FP32), "python", None),
        (_with(_OPT, f"net.requires_grad_(False)\n{_OPT}", _FP16), "python", None),
        (_with(_OPT, f"{_CASTS}{_OPT}", _FP16), "python", None),
        (_with(_DTYPE, f"{_DTYPE}, quantization_config=bits", _FP16), "python", None),
        (_with(_OPT, f"{_ADAPTS}{_OPT}", _FP16), "python", None),
        (_with("fp16=True", "bf16=True", _TRAINER), "python", None),
        (_with("fp16=True", 'fp16=True, deepspeed="z.json"', _TRAINER), "python", None),
        (_SFT, "python", None),
        (_with(".half()", "", _TORCH), "python", None),
        (_with("GradScaler()", "GradScaler(enabled=args.amp)", _TORCH), "python", None),
    ],
)  # fmt: skip
def test_fp16_weights_and_a_scaler(script: str, command: str, confidence: Confidence | None) -> None:
    found = _found(Example(script=script, command=command))
    assert found == ([] if confidence is None else [(_IDS[2], confidence)])


_TEACHER = _with(
    "accelerator.prepare(net, opt",
    "accelerator.prepare(net, teacher, opt",
    _with(_DTYPE, "", _FP16).replace("net, opt, data =", "net, teacher, opt, data ="),
)


def test_a_teacher_in_fp16_does_not_train() -> None:
    load = 'teacher = AutoModelForSequenceClassification.from_pretrained("t", dtype=torch.float16)\n'
    assert _found(Example(script=_with(_OPT, f"{load}{_OPT}", _TEACHER), command="python")) == []


_PARSED = """\
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--every", type=int, default=1)
args = parser.parse_args()
"""


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("--every 8", [Confidence.CERTAIN]),
        ("--every=2", [Confidence.CERTAIN]),
        ("--every 1", []),
        ("", []),
        ("--every $EVERY", [Confidence.LIKELY]),
    ],
)
def test_the_command_line_says_how_many_micro_batches(arguments: str, expected: list[Confidence]) -> None:
    script = _PARSED + _with("% 4", "% args.every", _BY_HAND)
    found = _found(Example(script=script, command="python", arguments=arguments))
    assert found == [(_IDS[1], confidence) for confidence in expected]


_TWICE = _plugin("num_steps=2").replace("Accelerator(grad", "Accelerator(gradient_accumulation_steps=4, grad")


@pytest.mark.parametrize(
    ("script", "is_refused"),
    [
        (_TWICE, True),
        (_TWICE.replace("steps=4", "steps=0"), True),
        (_TWICE.replace("steps=4", "steps=args.accumulate_every").replace("default=1", "default=2"), True),
        (_TWICE.replace("steps=4", "steps=1"), False),
        (_TWICE.replace("steps=4", "steps=args.accumulate_every"), False),
        (_TWICE.replace("steps=4", "steps=steps()"), False),
        (_plugin("num_steps=2"), False),
        (_ACCUMULATES, False),
    ],
)
def test_accumulation_steps_and_a_plugin_with_them(script: str, is_refused: bool) -> None:
    found = _found(Example(script=script, command="python"))
    assert (("accumulation-given-twice", Confidence.CERTAIN) in found) is is_refused


_BYPASSES = changed(_with(_CLEARS, ""), "accelerator.backward(error)", "error.backward()")
_WITHOUT_STEPS = changed(_BYPASSES, _MAKES, "Accelerator()")


@pytest.mark.parametrize(
    ("script", "command", "is_found"),
    [
        (_BYPASSES, None, True),
        (_BYPASSES, "torchrun --nproc_per_node 2", True),
        (_WITHOUT_STEPS, "accelerate launch --mixed_precision fp16", True),
        (changed(_WITHOUT_STEPS, "Accelerator()", "Accelerator(mixed_precision='fp16')"), None, True),
        (
            changed(_WITHOUT_STEPS, "net(x)", "wrapped(net)(x)"),
            "accelerate launch --mixed_precision fp16",
            True,
        ),
        (_WITHOUT_STEPS, None, False),
        (_WITHOUT_STEPS, "accelerate launch --mixed_precision bf16", False),
        (_with(_CLEARS, ""), None, False),
        (changed(_BYPASSES, _PREPARES, "data = load()"), None, False),
        (
            changed(_WITHOUT_STEPS, "            opt.step()", "            scaler.step(opt)"),
            "accelerate launch --mixed_precision fp16",
            False,
        ),
    ],
)
def test_the_loss_s_own_backward(script: str, command: str | None, is_found: bool) -> None:
    found = [rule for rule, _ in _found(Example(script=script, command=command))]
    assert found == (["loss-backward-beside-accelerator"] if is_found else [])
