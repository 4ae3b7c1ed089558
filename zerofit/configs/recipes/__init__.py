"""The presets of ds_configs/ and the recipes of launch/."""
