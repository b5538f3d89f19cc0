"""Outputs of a run: metrics, trackers, timeline, summary, samples, logs, console.

Uses no other package of `roll` and loads neither torch nor ray. Each file of a run is written by exactly one module.
"""
