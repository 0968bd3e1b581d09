"""Is this machine and this installation fit for training: `nmt doctor`."""
