"""The asynchronous core: when each group starts, what becomes of it, and which batch it is trained in.

It uses only asyncio and the standard library. The scheduler that drives a cluster therefore also runs, unchanged, under
a virtual clock in tests.
"""
