"""Outputs of a run: metrics, trackers, timeline, summary, samples, logs, console.

The package takes plain data and writes files and text. It uses no other package of `roll`, and importing it loads
neither torch nor ray. Import from the modules; each file of a run is written by exactly one of them.
"""
