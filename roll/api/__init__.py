"""Implementation of the Python interface that `import roll` exposes."""
