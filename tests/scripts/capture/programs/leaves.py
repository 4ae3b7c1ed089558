"""Leaves before its training."""

import sys

print("nothing to do")
sys.exit(3)
