"""Tools that a policy may call in its episodes: what they are, how calls are found in text, and where they run."""
