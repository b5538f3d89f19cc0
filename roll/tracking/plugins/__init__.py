"""Plug-in trackers: libraries or services of others (wandb, swanlab, trackio, the user's own), each in a process."""
