"""Damaged documents for fuzzing; the same seed gives the same text."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

JSON = """{
  "train_micro_batch_size_per_gpu": "auto",
  "gradient_accumulation_steps": 4,
  "gradient_clipping": 1.0,
  "bf16": {"enabled": true},
  "optimizer": {"type": "AdamW", "params": {"lr": 3e-5, "betas": [0.9, 0.999], "eps": 1e-8}},
  "zero_optimization": {
    "stage": 3,
    "offload_optimizer": {"device": "cpu", "pin_memory": true},
    "offload_param": {"device": "nvme", "nvme_path": "/local \\u00e9", "buffer_count": 5},
    "stage3_gather_16bit_weights_on_model_save": true,
    "sub_group_size": 1000000000
  },
  "steps_per_print": null
}
"""
HJSON = """{
  // sizes
  "train_batch_size": 8,
  gradient_accumulation_steps: 1
  optimizer: {type: AdamW, params: {"lr": 0.001,},},
  /* the engine */
  zero_optimization: {
    stage: 2  # shards
    offload_optimizer: {
      device: cpu
    }
    note: '''
      two
      lines
      '''
  },
}
"""
YAML = """# accelerate config
compute_environment: LOCAL_MACHINE
debug: false
deepspeed_config: &deepspeed
  gradient_accumulation_steps: 1
  zero3_init_flag: True
  zero_stage: 3   # shards
  offload_optimizer_device: 'none'
distributed_type: DEEPSPEED
downcast_bf16: 'no'
machine_rank: 0
mixed_precision: "bf16"
num_processes: 8
rdzv_args: {timeout: 1.5e+3, list: [a, ~, 0x10]}
other:
- <<: *deepspeed
  text: |
    one
    two
- *deepspeed
"""
ODD = (
    *"\x00\x1b\x7f\x85\xa0\u2028\u200b\ud800\ufeff\uffff\N{GRINNING FACE}\u0661",
    *"{}[]()<>,:;\"'`#/\\|&*!%@?~=-+._0123456789eE \t\r\n",
    *("\r\n", "//", "/*", "*/", "'''", '"""', "<<", "---", "...", "- ", ": ", "? ", "&a ", "*a"),
    *("!!python/object:os.system ", "!!set ", "!!binary ", "%YAML 1.1\n", "NaN", "-Infinity", "1e999"),
    *("0x", "2024-01-01", "1:60", "null", "yes", "\\ud800", "\\x", "\\u"),
)
"""What is put into texts: odd characters, and the signs of all three languages."""
_BRACKETS = "{}[]\"':,"


def mutate(text: str, random: Random, *, most: int = 3) -> str:
    """Return a text with one to `most` damages."""
    for _ in range(random.randint(1, most)):
        text = random.choice(_DAMAGES)(text, random)
    return text


def _flip(text: str, random: Random) -> str:
    """Change one bit of one byte, as a bad disk or a wrong encoding would."""
    data = bytearray(text.encode("utf-8", "surrogatepass"))
    if data:
        data[random.randrange(len(data))] ^= 1 << random.randrange(8)
    return data.decode("utf-8", "replace")


def _cut(text: str, random: Random) -> str:
    return text[: random.randint(0, len(text))]


def _remove(text: str, random: Random) -> str:
    start, end = _stretch(text, random)
    return text[:start] + text[end:]


def _double(text: str, random: Random) -> str:
    start, end = _stretch(text, random)
    return text[:end] + text[start:end] + text[end:]


def _move(text: str, random: Random) -> str:
    start, end = _stretch(text, random)
    rest = text[:start] + text[end:]
    at = random.randint(0, len(rest))
    return rest[:at] + text[start:end] + rest[at:]


def _insert(text: str, random: Random) -> str:
    at = random.randint(0, len(text))
    odd: str = random.choice(ODD)
    return text[:at] + odd * random.choice((1, 1, 1, 2, 70)) + text[at:]


def _swap_bracket(text: str, random: Random) -> str:
    places = [at for at, character in enumerate(text) if character in _BRACKETS]
    if not places:
        return text
    at = random.choice(places)
    return text[:at] + random.choice(_BRACKETS) + text[at + 1 :]


def _double_line(text: str, random: Random) -> str:
    lines = text.splitlines(keepends=True)
    if lines:
        lines.insert(random.randint(0, len(lines)), random.choice(lines))
    return "".join(lines)


def _indent_line(text: str, random: Random) -> str:
    lines = text.splitlines(keepends=True)
    if lines:
        at = random.randrange(len(lines))
        lines[at] = random.choice(("  ", "\t", " ")) + lines[at]
    return "".join(lines)


def _stretch(text: str, random: Random) -> tuple[int, int]:
    start = random.randint(0, len(text))
    return start, random.randint(start, min(len(text), start + random.choice((1, 5, 40, 400))))


_DAMAGES: tuple[Callable[[str, Random], str], ...] = (
    _flip,
    _cut,
    _remove,
    _double,
    _move,
    _insert,
    _insert,
    _swap_bracket,
    _double_line,
    _indent_line,
)
