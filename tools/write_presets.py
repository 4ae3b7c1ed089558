"""python -m tools.write_presets: renders ds_configs/ into the current folder."""

from __future__ import annotations

from pathlib import Path

from zerofit.configs.write.presets import preset_files
from zerofit.configs.write.write_files import write_files

if __name__ == "__main__":
    write_files({Path(name): text for name, text in preset_files().items()}, force=True)
