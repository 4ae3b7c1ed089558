"""Programs that write what the repository keeps: catalog, presets, reference pages."""
