"""Examples of the rules of zerofit/checking/rules/script/checkpoints.py."""

from __future__ import annotations

from rule_examples.example import SMALL, Example, Examples, changed, ending

_RANKS = "torchrun --nproc_per_node 2"
_ON_CPU = changed(SMALL, "Accelerator()", "Accelerator(cpu=True)")
_GENTLE = changed(_ON_CPU, ".square().mean()", ".square().mean() / 100")
"""Gradients that the harness's reference does not clip."""
_NAMED = changed(
    _GENTLE, "import Accelerator\n", "import Accelerator\nfrom accelerate.utils import ProjectConfiguration\n"
)
_NAMED = changed(
    _NAMED,
    "cpu=True",
    'cpu=True, project_config=ProjectConfiguration("out", automatic_checkpoint_naming=True)',
)
_SAVES = "accelerator.save_state()"
_SAVES_HERE = 'accelerator.save_state(".")'
_LOADS = 'accelerator.load_state("first")'
_LOOP = "for batch in loader:\n"
_TWICE = changed(_GENTLE, _LOOP, f'accelerator.save_state("first")\naccelerator.wait_for_everyone()\n{_LOOP}')


def _loading(lines: str) -> Example:
    """Return an example that loads what it began with after half of its batches."""
    script = changed(
        _TWICE, _LOOP, f"for number, batch in enumerate(loader):\n    if number == 4:\n{lines}\n"
    )
    return Example(command=_RANKS, script=script)


def _saving(script: str, line: str) -> Example:
    return Example(command=_RANKS, script=ending(script, line))


def _on_main(line: str) -> str:
    return f"if accelerator.is_main_process:\n    {line}"


EXAMPLES = {
    "save-state-needs-all-ranks": Examples(
        bad=_saving(_NAMED, _on_main(_SAVES)), good=_saving(_NAMED, _SAVES)
    ),
    "save-state-loses-random-states": Examples(
        bad=_saving(
            _GENTLE, f'{_on_main(_SAVES_HERE)}\naccelerator.wait_for_everyone()\naccelerator.load_state(".")'
        ),
        good=_saving(_GENTLE, f'{_SAVES_HERE}\naccelerator.wait_for_everyone()\naccelerator.load_state(".")'),
    ),
    "load-state-needs-all-ranks": Examples(
        bad=_loading(f"        if accelerator.is_main_process:\n            {_LOADS}"),
        good=_loading(f"        {_LOADS}"),
    ),
}
