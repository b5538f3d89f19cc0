"""What a run leaves behind and shows while it runs: metrics, trackers, timeline, summary, samples, logs, console.

Plain data in, files and text out. This room uses no other room, and importing it loads no torch and no ray. Import
from the modules; each file of a run is written by exactly one of them.
"""
