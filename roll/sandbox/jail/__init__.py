"""The walls around untrusted code, built by a small supervisor process.

The supervisor runs in a bare interpreter for each call, so the modules here import the standard library only, and of
that only what loads in a few milliseconds.
"""
