"""Environment managers. Each one runs one episode between an environment and the policy.

The policy is trained on exactly what it sampled: its tokens are never encoded again, and the response mask is true at
them and nowhere else. Managers are pure asyncio and keep no state between episodes.
"""
