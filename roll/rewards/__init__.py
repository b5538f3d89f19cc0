"""Verifiers, and the processes they run in.

Responses, ground truths and users' functions are not trusted to be quick or well-formed, or to leave their process
alive.
"""
