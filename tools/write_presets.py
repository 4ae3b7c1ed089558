"""python -m tools.write_presets: renders ds_configs/ of the presets into the current folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from zerofit.configs.write.accelerate import accelerate_yaml
from zerofit.configs.write.deepspeed import deepspeed_json
from zerofit.configs.write.write_files import write_files
from zerofit.core.presets import PRESETS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zerofit.core.presets import Preset

_HEAD = """\
<!-- Written by `make presets` from zerofit/core/presets.py: edit that. -->
# Presets

One DeepSpeed JSON a strategy, and the accelerate YAML that goes with it; FSDP2 needs the YAML alone. They
work unchanged in a script that uses `Accelerator()` and in one that uses `Trainer`, in bf16, fp16 and fp32:
what the script or the launch command decides is `"auto"`, and both fill it in. Copy the folder into your
project, then:

```sh
accelerate launch --config_file ds_configs/accelerate_z3.yaml \\
  --num_processes 8 --mixed_precision bf16 train.py
```

With `Trainer`, `--deepspeed ds_configs/ds_z3.json` (with `--bf16`) does the same. With zerofit,
`zerofit launch --preset z3 train.py` does, and also keeps the script's own clipping, finds a free port,
and rehearses on the CPU with `--cpu --num-processes 2`.

Bytes a parameter on each GPU are those of the model states for AdamW in 16 bit with fp32 master weights (2
weights, 2 gradients, 12 optimizer states), over N ranks; activations, buffers and the layer that is gathered
come on top. Bytes of RAM are a least: pinned buffers are rounded up to powers of two.

"""

_TAIL = """
Things to know:

- Plain accelerate fills `gradient_clipping: "auto"` with 1.0 and ignores `clip_grad_norm_` under DeepSpeed.
  Write the number you want; 0 is off. `zerofit launch` follows the script instead.
- `reduce_bucket_size` and its kin are numbers, as `"auto"` needs a model with `config.hidden_size`.
- Change `nvme_path` in `ds_z3_nvme.json` to a folder on a local NVMe disk, and raise `buffer_size` above
  the number of elements of the largest parameter (vocabulary x hidden size, most often).
- The FSDP2 files shard the classes in the model's `_no_split_modules`; a model without them needs
  `fsdp_transformer_layer_cls_to_wrap`. For hybrid sharding over two nodes of eight GPUs:
  `zerofit config --preset fsdp2 --num-machines 2 --num-processes 16 --dp-replicate-size 2`.
- For `accelerate_fsdp2_qlora.yaml` the script loads the base with
  `BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_storage=torch.bfloat16)`;
  `zerofit launch --preset fsdp2-qlora` loads it so itself. Trainer's `save_model()` writes no
  `model.safetensors` under `SHARDED_STATE_DICT`.
- Explicit numbers in place of `"auto"`, for your own batch:
  `zerofit config --preset z3 --num-processes 8 --micro-batch-size 4 --global-batch-size 64`.
"""


def _readme(presets: Sequence[Preset]) -> str:
    """Return the README's text."""
    columns = ("preset", "strategy", "files", "bytes a parameter", "fits where", "costs", "never with")
    rows = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    rows += [_row(preset) for preset in presets]
    return _HEAD + "\n".join(rows) + "\n" + _TAIL


def _row(preset: Preset) -> str:
    names = (preset.deepspeed_file, preset.accelerate_file)
    files = ", ".join(f"[{name}]({name})" for name in names if name is not None)
    cells = (
        f"`{preset.name}`",
        preset.title,
        files,
        preset.gpu_bytes_per_parameter,
        preset.fits,
        preset.costs,
        preset.not_with,
    )
    return f"| {' | '.join(cells)} |"


def preset_files() -> dict[str, str]:
    """Return the text of each file of ds_configs/ by its path below the repository's root."""
    files = {"ds_configs/README.md": _readme(PRESETS)}
    for preset in PRESETS:
        deepspeed_file = f"ds_configs/{preset.deepspeed_file}" if preset.deepspeed_file else None
        if deepspeed_file is not None:
            files[deepspeed_file] = deepspeed_json(preset.strategy, trains=preset.trains)
        files[f"ds_configs/{preset.accelerate_file}"] = accelerate_yaml(
            preset.strategy, topology=None, deepspeed_file=deepspeed_file, is_used_alone=True
        )
    return files


if __name__ == "__main__":
    write_files({Path(name): text for name, text in preset_files().items()}, force=True)
