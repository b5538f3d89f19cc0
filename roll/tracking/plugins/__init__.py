"""Plug-in trackers: external libraries or services (wandb, swanlab, trackio, a user's own), each in its own process."""
