"""Plug-in trackers, which are libraries or services of others: wandb, swanlab, trackio, and the user's own.

Each works in a process of its own, which the driver feeds through a bounded queue. A library may hang, crash, print, or
block the interpreter's exit there: no run waits for it or fails because of it.
"""
