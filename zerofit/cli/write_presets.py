"""python -m zerofit.cli.write_presets: renders ds_configs/ and launch/ into the current folder."""

from __future__ import annotations

from pathlib import Path

from zerofit.cli.write_files import write_files
from zerofit.render.shipped import shipped_files

if __name__ == "__main__":
    write_files({Path(name): text for name, text in shipped_files().items()}, force=True)
