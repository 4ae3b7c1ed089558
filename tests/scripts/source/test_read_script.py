"""What a script's source shows: routes, optimizers, arguments, models and what becomes of them."""

from __future__ import annotations

from textwrap import dedent

import pytest

from zerofit.core.command import Route
from zerofit.scripts.facts import Action, ModelConstructor, ModelState, ScriptFacts
from zerofit.scripts.source.read_script import read_script

_IMPORTS = """\
import deepspeed
import torch
import torch.distributed as dist
from accelerate import Accelerator
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
"""
_PREPARED = f"""{_IMPORTS}
accelerator = Accelerator()
model = AutoModelForCausalLM.from_pretrained("gpt2")
optimizer = torch.optim.AdamW(model.parameters())
model, optimizer = accelerator.prepare(model, optimizer)
"""


def _facts(source: str) -> ScriptFacts:
    """Return what a source shows."""
    return read_script(dedent(source), name="train.py")


@pytest.mark.parametrize(
    ("source", "route"),
    [
        ("from accelerate import Accelerator\nAccelerator()", Route.ACCELERATE),
        ("import accelerate as a\ndef main():\n    a.Accelerator()\nmain()", Route.ACCELERATE),
        ("from transformers import Trainer\nTrainer()", Route.TRAINER),
        ("import transformers\nclass T(transformers.Seq2SeqTrainer):\n    pass\nT()", Route.TRAINER),
        ("import deepspeed as ds\nds.initialize(model=model)", Route.NATIVE),
        ("import deepspeed\nfrom accelerate import Accelerator\nAccelerator()\ndeepspeed.initialize()", None),
        ("from lightning import Trainer\nTrainer()", None),
    ],
)
def test_route(source: str, route: Route | None) -> None:
    assert _facts(source).route is route


@pytest.mark.parametrize(
    ("source", "ids"),
    [
        ("import torch.optim as optim\noptim.SGD(model.parameters(), lr=1)", ["torch.SGD"]),
        ("import torch\ntorch.optim.Muon(params=groups)", ["torch.Muon"]),
        ("from bitsandbytes.optim import PagedAdamW8bit\nPagedAdamW8bit(p)", ["bitsandbytes.PagedAdamW8bit"]),
        ("from transformers.optimization import Adafactor\nAdafactor(p)", ["transformers.Adafactor"]),
        ("from deepspeed.ops.adam import FusedAdam\nFusedAdam(p)", ["deepspeed.FusedAdam"]),
        ("from lion_pytorch import Lion\nLion(model.parameters())", ["other:lion_pytorch.Lion"]),
        ("from lion_pytorch import Lion\nLion()", []),
        ("import torch\ntorch.optim.lr_scheduler.StepLR(optimizer, 1)", []),
        ("from torch import optim\noptim.Adam(p)\noptim.RMSprop(p)", ["torch.Adam", "torch.RMSprop"]),
    ],
)  # fmt: skip
def test_optimizers(source: str, ids: list[str]) -> None:
    assert [optimizer.id for optimizer in _facts(source).optimizers] == ids


def test_an_optimizer_says_where_it_is_made() -> None:
    (optimizer,) = _facts("import torch\n\nname = 'ä'; o = torch.optim.SGD(p)").optimizers
    place = optimizer.place
    assert (place.line, place.column, optimizer.text) == (3, 17, "torch.optim.SGD")


def test_literal_keywords_of_the_accelerator_and_the_arguments() -> None:
    found = _facts("""
        from accelerate import Accelerator
        from trl import SFTConfig
        STEPS = 4
        more = dict(bf16=True)
        Accelerator(mixed_precision="bf16", gradient_accumulation_steps=STEPS, log_with=args.log)
        SFTConfig(max_grad_norm=-1.0, gradient_checkpointing_kwargs={"use_reentrant": False}, **more)
    """)
    assert [(item.name, item.value, item.text) for item in found.accelerator_keywords] == [
        ("mixed_precision", "bf16", 'mixed_precision="bf16"'),
        ("gradient_accumulation_steps", 4, "gradient_accumulation_steps=STEPS"),
    ]
    assert [(item.name, item.value, item.place.line) for item in found.training_arguments] == [
        ("max_grad_norm", -1.0, 7),
        ("gradient_checkpointing_kwargs.use_reentrant", False, 7),
        ("bf16", True, 7),
    ]


_FOLLOWED = [
    ("model = accelerator.unwrap_model(model)", ModelState.IN_ENGINE),
    ("model = model.module", ModelState.IN_ENGINE),
    ("model.train()", ModelState.ENGINE),
    ("model = model.to('cpu').eval()", ModelState.ENGINE),
    ("model = AutoModelForCausalLM.from_pretrained('gpt2')", ModelState.PLAIN),
    ("if x:\n    model = wrap(model)", None),
    ("if x:\n    model = accelerator.unwrap_model(model)\nelse:\n    raise ValueError", ModelState.IN_ENGINE),
    ("def f(model):\n    return accelerator.unwrap_model(model)\nmodel = f(model)", ModelState.IN_ENGINE),
    ("class Run:\n    def __init__(self, m):\n        self.m = m\nmodel = Run(model).m", ModelState.ENGINE),
    ("for _ in range(2):\n    pass\nelse:\n    model = unknown()", None),
    ("*_, model = 1, 2, model", ModelState.ENGINE),
]


@pytest.mark.parametrize(("lines", "state"), _FOLLOWED)
def test_what_became_of_a_model(lines: str, state: ModelState | None) -> None:
    found = _facts(f"{_PREPARED}{lines}\nmodel.generate(x)\n").find(Action.GENERATE)
    assert [call.state for call in found] == ([state] if state else [])


@pytest.mark.parametrize(
    ("made", "source"),
    [
        ("AutoModelForCausalLM.from_pretrained('gpt2')", ModelConstructor.PRETRAINED),
        ("AutoModelForCausalLM.from_config(config)", ModelConstructor.CONFIG),
        ("transformers.LlamaForCausalLM(config)", ModelConstructor.CLASS),
        ("transformers.BertModel(config)", ModelConstructor.CLASS),
        ("torch.nn.Linear(2, 2)", ModelConstructor.OWN_CLASS),
        ("Net()", ModelConstructor.OWN_CLASS),
    ],
)
def test_how_a_model_is_made(made: str, source: ModelConstructor) -> None:
    own = "import transformers\nclass Net(torch.nn.Module):\n    pass\n"
    (model,) = _facts(f"{_IMPORTS}{own}model = {made}\n").models
    assert (model.made.text, model.source, model.is_trained) == (made, source, False)


@pytest.mark.parametrize(
    "made",
    [
        "AutoTokenizer.from_pretrained('gpt2')",
        "AutoConfig.from_pretrained('gpt2')",
        "AutoProcessor.from_pretrained('gpt2')",
        "PreTrainedTokenizerFast(file)",
    ],
)
def test_what_is_no_model(made: str) -> None:
    name = made.partition("(")[0].partition(".")[0]
    assert _facts(f"from transformers import {name}\nx = {made}\n").models == ()


def test_calls_stand_in_the_order_in_which_they_run() -> None:
    found = _facts(f"""{_IMPORTS}
def build():
    return AutoModelForCausalLM.from_pretrained("gpt2")

def main():
    accelerator = Accelerator()
    model = accelerator.prepare(build())
    model.generate(1)

if __name__ == "__main__":
    main()
""")
    assert [call.action for call in found.calls] == [
        Action.MAKE_ACCELERATOR, Action.MAKE_MODEL, Action.PREPARE, Action.USE_WRAPPED, Action.GENERATE,
    ]  # fmt: skip
    assert found.models[0].is_trained
    assert found.models[0].later_setup is None


@pytest.mark.parametrize(
    ("test", "is_conditional"),
    [('__name__ == "__main__"', False), ("'__main__' == __name__", False), ("__name__ != '__main__'", True)],
)
def test_the_guard_of_a_script_is_no_condition(test: str, is_conditional: bool) -> None:
    (call,) = _facts(f"{_IMPORTS}if {test}:\n    Accelerator()\n").find(Action.MAKE_ACCELERATOR)
    assert call.is_conditional is is_conditional


def test_functions_that_nothing_calls_are_read_too() -> None:
    found = _facts(
        f"{_IMPORTS}def train():\n    accelerator = Accelerator()\n    accelerator.save_state('x')\n"
    )
    assert [call.seen.text for call in found.find(Action.SAVE_STATE)] == ["accelerator.save_state('x')"]


def test_recursion_and_many_calls_come_to_an_end() -> None:
    source = "def f0():\n    f0()\n" + "".join(
        f"def f{n}():\n    f{n - 1}()\n    f{n - 1}()\n    f{n - 1}()\n" for n in range(1, 40)
    )
    assert _facts(f"{source}f39()\n").calls == ()
