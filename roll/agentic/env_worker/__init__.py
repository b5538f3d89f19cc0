"""Environment workers: processes that hold many environments each, and the pool that shares them out to episodes.

`host` and `threads` live in a worker and know no Ray; `worker` is the Ray actor around them; `process` and `pool` are
the driver's side.
"""
