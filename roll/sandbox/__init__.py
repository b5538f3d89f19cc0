"""The sandbox for untrusted programs: code that the policy runs as a tool, or writes as its response.

It uses only the standard library and no other package of `roll`, because its supervisor is a new process for each
program and must start fast. `sandbox` is the caller's side, `supervisor` starts and watches a program, `filesystem` and
`kernel` isolate it.
"""
