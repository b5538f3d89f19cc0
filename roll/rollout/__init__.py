"""The asynchronous core: it decides when each group starts, whether it is kept, and which batch it is trained in.

It uses only the standard library, with asyncio. The scheduler that drives a cluster therefore also runs, unchanged,
under a virtual clock in tests.
"""
