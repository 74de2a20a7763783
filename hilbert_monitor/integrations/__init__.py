"""Thin adapters for other trainers. Each imports its framework only when it is used."""
