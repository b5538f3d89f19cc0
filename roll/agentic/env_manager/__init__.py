"""Environment managers: one conducts one episode, an environment on one side, the policy on the other.

What the policy sampled is what is trained: its tokens are never encoded again, and the response mask is true at them
and nowhere else. Managers are pure asyncio and hold nothing between episodes.
"""
