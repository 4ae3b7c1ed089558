"""Writes matplotlib plots, and checks early that they can be written."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

from zerofit.configs.write.write_files import check_can_write, write_bytes
from zerofit.core.errors import UserError

if TYPE_CHECKING:
    from pathlib import Path

_FLAG = "--plot FILE"


def check_can_plot(path: Path, *, force: bool) -> None:
    """Check early that --plot can be written: matplotlib, the file extension, the folder.

    Args:
        path: the file.
        force: whether it may overwrite an existing file.

    Raises:
        UserError: matplotlib is missing or does not support the extension, the file exists, or its folder is
            not writable.
    """
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError:
        raise UserError(
            "plots-missing",
            "plots need matplotlib",
            found=f"--plot {path}, and no matplotlib in this environment",
            why="zerofit does not install it, as only plots need it",
            fix="pip install 'zerofit[plots]', or leave out --plot",
        ) from None
    endings = sorted(FigureCanvasBase.get_supported_filetypes())
    if path.suffix.lstrip(".").lower() not in endings:
        raise UserError(
            "plot-format-unknown",
            "the plot's file extension is not supported",
            found=f"--plot {path}",
            why=f"matplotlib supports {', '.join(endings)}",
            fix=f"name it {path.with_suffix('.png')}",
        )
    check_can_write(path, force=force, flag=_FLAG)


def save_figure(figure: Any, path: Path, *, dpi: int) -> None:
    """Write a matplotlib figure to a file, creating its folder.

    Raises:
        UserError: the file can't be written.
    """
    picture = io.BytesIO()
    figure.savefig(picture, dpi=dpi, format=path.suffix.lstrip(".").lower())
    write_bytes(path, picture.getvalue(), flag=_FLAG)
