"""Leaves without a word to anybody."""

import os

os._exit(7)
