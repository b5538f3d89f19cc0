"""What a configuration means: whether it can work, its arithmetic, its memory and its needs.

Nothing here imports torch, ray or an engine, or touches a model or a GPU.
"""
