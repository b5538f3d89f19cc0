"""Prompts in, samples out: data sets, templates, the stream of prompts, and the records of a run.

Nothing here needs torch, so that all data is read and checked before anything heavy is loaded.
"""
