"""Measures every optimizer under ZeRO and offload against one unsharded process, for the optimizer table."""
