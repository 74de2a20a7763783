"""From an optimizer step to a record of its geometry."""
