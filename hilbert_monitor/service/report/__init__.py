"""One page and its tables for runs on disk, without a server."""
