"""What looks at runs: their report. Nothing in this room loads torch."""
