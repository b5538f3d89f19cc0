"""Generation engines, one folder per library, and the pool of engine replicas."""
