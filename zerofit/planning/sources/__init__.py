"""Sources of settings: flags and keyword arguments, launch lines, configuration files, presets and plans."""
