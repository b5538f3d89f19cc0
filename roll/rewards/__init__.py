"""Verifiers, and the processes they run in.

Responses, ground truths and users' functions are not trusted to be quick, to be sane, or to leave their process alive.
"""
