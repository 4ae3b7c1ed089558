"""Splits the training forward pass into micro-batches, behind the script's back."""

from __future__ import annotations

from zerofit.training.micro_batches.installing import install, settle
from zerofit.training.micro_batches.splitter import Splitter

__all__ = ["Splitter", "install", "settle"]
