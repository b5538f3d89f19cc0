"""An address at which agents reach the policy that is trained."""
