"""Installation folder of the catalogs of GPUs, rates, models and configuration keys."""

from __future__ import annotations

import os

CATALOG_FOLDER = os.path.join(os.path.dirname(os.path.dirname(__file__)), "catalog")
"""Absolute path."""
