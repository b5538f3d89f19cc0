"""The isolation around untrusted code, set up by a small supervisor process.

The supervisor runs in a bare interpreter for each call, so the modules here import only parts of the standard library
that load in a few milliseconds.
"""
