"""The HTTP endpoint through which agents call the policy in training."""
