"""Trackers that are libraries of others, or services: wandb, swanlab, trackio, and yours.

Each works in a process of its own, which the driver feeds through a bounded queue. A library that hangs, crashes,
prints, or holds the interpreter at its exit does so over there: no run waits for it, none fails because of it.
"""
