"""Examples of the rules of zerofit/checking/rules/script/gradients.py."""

from __future__ import annotations

from rule_examples.example import SMALL, Example, Examples, changed

_RANKS = "torchrun --nproc_per_node 2"
_ON_CPU = changed(SMALL, "Accelerator()", "Accelerator(cpu=True)")
_GENTLE = changed(_ON_CPU, ".square().mean()", ".square().mean() / 100")
"""Gradients that the harness's reference does not clip."""
_LOOP = """\
for batch in loader:
    loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean() / 100
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
"""
_ACCUMULATES = changed(
    changed(_GENTLE, "cpu=True", "cpu=True, gradient_accumulation_steps=4"),
    _LOOP,
    """\
for batch in loader:
    with accelerator.accumulate(model):
        loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean() / 100
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
""",
)
_BY_SGD = changed(_ACCUMULATES, "AdamW(model.parameters(), lr=0.01)", "SGD(model.parameters(), lr=1.0)")
"""AdamW's step is the same whatever number the gradients are divided by."""
_CLEARS_FIRST = changed(_ACCUMULATES, "        optimizer.zero_grad()\n", "")
_CLEARS_FIRST = changed(_CLEARS_FIRST, "        loss = ", "        optimizer.zero_grad()\n        loss = ")
_BY_PLUGIN = changed(
    changed(_ACCUMULATES, "gradient_accumulation_steps=4", "gradient_accumulation_plugin=plugin"),
    "accelerator = ",
    "plugin = GradientAccumulationPlugin(num_steps=4)\naccelerator = ",
)
_BY_PLUGIN = changed(
    _BY_PLUGIN,
    "from torch.utils",
    "from accelerate.utils import GradientAccumulationPlugin\nfrom torch.utils",
)
_BY_HAND = changed(
    _GENTLE,
    _LOOP,
    """\
for step, batch in enumerate(loader, 1):
    loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean() / 400
    accelerator.backward(loss)
    if step % 4 == 0:
        optimizer.step()
        optimizer.zero_grad()
""",
)
_WITH_SCALER = changed(
    _GENTLE, "for batch in loader:\n", 'scaler = torch.amp.GradScaler("cpu")\nfor batch in loader:\n'
)
_SCALED = changed(
    _WITH_SCALER,
    "    accelerator.backward(loss)\n    optimizer.step()\n",
    "    scaler.scale(loss).backward()\n    scaler.step(optimizer)\n    scaler.update()\n",
)
_HALF = changed(
    changed(_SCALED, "optimizer = torch", "model.half()\noptimizer = torch"),
    "model(batch)",
    "model(batch.half())",
)


EXAMPLES = {
    "zero-grad-before-backward": Examples(
        bad=Example(command=_RANKS, script=_CLEARS_FIRST),
        good=Example(command=_RANKS, script=_ACCUMULATES),
    ),
    "accumulation-given-twice": Examples(
        bad=Example(
            command=_RANKS, script=changed(_BY_PLUGIN, "cpu=True", "cpu=True, gradient_accumulation_steps=4")
        ),
        good=Example(command=_RANKS, script=_BY_PLUGIN),
    ),
    "zero-grad-in-each-micro-batch": Examples(
        bad=Example(command=_RANKS, script=changed(_BY_HAND, "        optimizer.zero", "    optimizer.zero")),
        good=Example(command=_RANKS, script=_BY_HAND),
    ),
    "loss-backward-beside-accelerator": Examples(
        bad=Example(script=changed(_BY_SGD, "accelerator.backward(loss)", "loss.backward()"), command=_RANKS),
        good=Example(script=_BY_SGD, command=_RANKS),
    ),
    "fp16-weights-under-grad-scaler": Examples(
        bad=Example(command=_RANKS, script=_HALF),
        good=Example(command=_RANKS, script=_SCALED),
    ),
}
