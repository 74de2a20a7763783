"""A look at the LM head of checkpoints, without attaching anything: reads files, and trains and writes nothing."""
