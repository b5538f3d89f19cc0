"""Verifiers and reward models, and the processes they run in.

Responses, ground truths and users' functions are not trusted: they may be slow or malformed, or may kill their process.
"""
