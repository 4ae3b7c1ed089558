"""Which releases of a package the catalog's history is read off."""

from __future__ import annotations

import pytest

from tools.write_catalog_history import releases_of


def test_the_first_release_of_each_minor_one_in_the_supported_range_the_oldest_first() -> None:
    listed = "transformers (6.0.0)\nAvailable versions: 6.0.0, 5.10.4, 5.10.1, 5.9.0, 5.0.1, 5.0.0, 4.57.6\n"
    assert releases_of("transformers", listed) == ["5.0.0", "5.9.0", "5.10.1"]


def test_of_deepspeed_every_release() -> None:
    listed = "deepspeed (0.19.1)\nAvailable versions: 0.19.1, 0.19.0, 0.18.4, 0.18.3, 0.18.2\n"
    assert releases_of("deepspeed", listed) == ["0.18.3", "0.18.4", "0.19.0", "0.19.1"]


def test_a_list_without_releases_is_no_list() -> None:
    with pytest.raises(ValueError, match="pip names no releases of accelerate"):
        releases_of("accelerate", "")
