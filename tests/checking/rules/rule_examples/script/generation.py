"""Examples of the rules of zerofit/checking/rules/script/generation.py."""

from __future__ import annotations

from rule_examples.example import INFERENCE, Examples, at_zero, changed

_ONE_CALL = "model.module.generate(prompts[:2], max_new_tokens=4, do_sample=False)\n"
_EACH = """\
with accelerator.split_between_processes(list(prompts)) as own:
    for prompt in own:
        model.module.generate(prompt[None], max_new_tokens=4, do_sample=False)
"""
_ASSISTED = """\
assistant = LlamaForCausalLM(config)
length = 16 if accelerator.is_main_process else 4
model.module.generate(prompts[:1], max_new_tokens=length, do_sample=False, assistant_model=assistant)
"""
_IN_CHUNKS = """\
length = 8 if accelerator.is_main_process else 4
model.module.generate(prompts[:1, :length], max_new_tokens=4, do_sample=False, prefill_chunk_size=2)
"""
_GATHERED = """\
length = 12 if accelerator.is_main_process else 4
tokens = model.module.generate(prompts[:2], max_new_tokens=length, do_sample=False)
tokens = accelerator.gather(tokens)
"""
_WITH_LLAMA = changed(INFERENCE, "LlamaConfig, set_seed", "LlamaConfig, LlamaForCausalLM, set_seed")


def _generating(lines: str, script: str = INFERENCE) -> str:
    return changed(script, _ONE_CALL, lines)


EXAMPLES = {
    "zero3-ranks-run-equally-often": Examples(
        bad=at_zero(3, _generating(_EACH)),
        good=at_zero(3, _generating(changed(_EACH, "list(prompts)", "list(prompts), apply_padding=True"))),
    ),
    "zero3-no-assisted-generation": Examples(
        bad=at_zero(3, _generating(_ASSISTED, _WITH_LLAMA)),
        good=at_zero(3, _generating(changed(_ASSISTED, ", assistant_model=assistant", ""), _WITH_LLAMA)),
    ),
    "zero3-no-chunked-prefill": Examples(
        bad=at_zero(3, _generating(_IN_CHUNKS)),
        good=at_zero(3, _generating(changed(_IN_CHUNKS, ", prefill_chunk_size=2", ""))),
    ),
    "gather-needs-padded-tokens": Examples(
        bad=at_zero(3, _generating(_GATHERED)),
        good=at_zero(
            3,
            _generating(
                changed(
                    _GATHERED, "gather(tokens)", "gather(accelerator.pad_across_processes(tokens, dim=1))"
                )
            ),
        ),
    ),
}
