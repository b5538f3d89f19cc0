"""Configurations of other systems: how their keys read here.

One file for each system: its table, and the settings that follow from several keys. The loader reads files in ROLL's
dialect by it, `roll convert` writes files of ours by it, and an unknown key gets its hint from it.
"""
