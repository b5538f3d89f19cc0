"""Environments, tools and episodes of the agentic pipeline."""
