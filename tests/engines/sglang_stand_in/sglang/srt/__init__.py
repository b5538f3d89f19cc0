"""Where SGLang keeps its runtime."""
