"""Environments, tools and episodes."""
