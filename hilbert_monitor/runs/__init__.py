"""Records, logs, alerts and metrics of runs. Nothing here imports torch, so the service needs none."""
