"""Data of a run: data sets, turn templates, the stream of prompts, and the records of prompts, samples and batches.

Nothing here needs torch, so all data is read and checked before anything heavy is loaded.
"""
