"""This machine's GPUs, limits, toolchain, installed versions and rates; the catalogs of both."""
