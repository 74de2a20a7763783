"""Answers browsers, programs and Prometheus over HTTP."""
