"""All that lies on disk for a run."""
