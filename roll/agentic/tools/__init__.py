"""Tools for the policy: built-in tools, the parser of tool calls, and the environment wrapper that executes them."""
