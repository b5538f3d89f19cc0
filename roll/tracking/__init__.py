"""Outputs of a run: metrics, trackers, timeline, summary, samples, logs, console.

This package uses no other package of `roll`, and imports neither torch nor ray. Each file of a run is written by
exactly one module.
"""
