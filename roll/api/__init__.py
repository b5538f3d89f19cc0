"""The public face for Python programs and notebooks; `import roll` offers it."""
