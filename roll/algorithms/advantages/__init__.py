"""Advantage estimators by name, and what happens to advantages afterwards.

One file per family; the modules imported here register their estimators.
"""
