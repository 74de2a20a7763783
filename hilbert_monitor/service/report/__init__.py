"""The report: one HTML page, CSV and JSON for runs on disk, without a server."""
