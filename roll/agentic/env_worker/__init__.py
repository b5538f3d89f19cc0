"""Environment workers: processes that hold many environments each, and the pool that assigns them to episodes.

`host` and `threads` run in a worker and do not use Ray; `worker` is the Ray actor around them; `process` and `pool` are
the driver's part.
"""
