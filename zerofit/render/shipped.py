"""Every file of ds_configs/ and launch/, rendered from the presets."""

from __future__ import annotations

from zerofit.presets import PRESETS
from zerofit.render.accelerate import accelerate_yaml
from zerofit.render.deepspeed import deepspeed_json
from zerofit.render.kubernetes import kubernetes_yaml
from zerofit.render.presets_readme import presets_readme
from zerofit.render.shell import multi_node_script, single_node_script
from zerofit.render.slurm import slurm_script

_RECIPE_PRESET = "z2"
"""The lowest stage that shards more than optimizer states; the recipes let the user name another."""
_NUM_NODES = 2
"""The fewest that show what several nodes need."""
_RANKS_PER_NODE = 8
"""ASSUMPTION: GPUs of one node, as in most servers for training."""


def shipped_files() -> dict[str, str]:
    """Return the text of each shipped file by its path below the repository's root."""
    files = {"ds_configs/README.md": presets_readme(PRESETS)}
    for preset in PRESETS:
        deepspeed_file = f"ds_configs/{preset.deepspeed_file}"
        files[deepspeed_file] = deepspeed_json(preset.strategy, trains=preset.trains)
        files[f"ds_configs/{preset.accelerate_file}"] = accelerate_yaml(
            preset.strategy, topology=None, deepspeed_file=deepspeed_file
        )
    files["launch/single_node.sh"] = single_node_script(preset=_RECIPE_PRESET)
    files["launch/multi_node.sh"] = multi_node_script(preset=_RECIPE_PRESET)
    sizes = {"num_nodes": _NUM_NODES, "ranks_per_node": _RANKS_PER_NODE}
    files["launch/slurm.sbatch"] = slurm_script(preset=_RECIPE_PRESET, **sizes)
    files["launch/kubernetes.yaml"] = kubernetes_yaml(preset=_RECIPE_PRESET, **sizes)
    return files
