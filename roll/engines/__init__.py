"""Generation engines, one folder each, and the pool of their replicas."""
