"""Results of a generation on disk, so that it can be resumed after a kill."""
