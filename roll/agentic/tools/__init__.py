"""Tools that a policy may call in its episodes: the tools, the parser of calls, and the environment that runs them."""
