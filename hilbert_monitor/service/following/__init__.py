"""Reads run logs as they grow, and holds what is known of each run."""
