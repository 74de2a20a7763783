"""What a run leaves behind: no torch here, so that whoever looks at runs needs none."""
