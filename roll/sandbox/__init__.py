"""The sandbox for untrusted programs: those that a policy calls as a tool, and those that it answers with.

It uses no other package of `roll` and only the standard library, since its supervisor starts anew for each program.
`sandbox` is the caller's side; `supervisor` starts and watches a program, `filesystem` and `kernel` isolate it.
"""
