"""Where untrusted programs run: those that a policy calls as a tool, and those that it answers with.

Uses no other room and nothing but the standard library: its supervisor starts anew for each program.
"""
