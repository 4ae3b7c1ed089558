"""Examples of the rules of zerofit/checking/rules/script/models.py."""

from __future__ import annotations

from rule_examples.example import LANGUAGE, LOADED, Example, Examples, at_zero, changed

_IN_BITS = changed(LOADED, 'from_pretrained("model")', 'from_pretrained("model", load_in_4bit=True)')
_RANKS = "torchrun --nproc_per_node 2"
_ON_CPU = changed(LANGUAGE, "Accelerator()", "Accelerator(cpu=True)")
_ON_CPU = changed(_ON_CPU, "model(**batch).loss", "model(**batch).loss / 100")
"""With gradients that the harness's reference does not clip."""
_TRAINS = "model, optimizer, loader = accelerator.prepare(model, optimizer, loader)\n"
_UNWRAPS = changed(_ON_CPU, _TRAINS, f"{_TRAINS}rate = accelerator.unwrap_model(model).config.vocab_size\n")


EXAMPLES = {
    "load-in-bits-needs-config": Examples(bad=at_zero(1, _IN_BITS), good=at_zero(1, LOADED)),
    "prepared-model-hides-attributes": Examples(
        bad=Example(
            command=_RANKS, script=changed(_ON_CPU, _TRAINS, f"{_TRAINS}rate = model.config.vocab_size\n")
        ),
        good=Example(command=_RANKS, script=_UNWRAPS),
    ),
}
