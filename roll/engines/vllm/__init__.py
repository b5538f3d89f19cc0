"""`vllm`: the engine strategy that runs vLLM's asynchronous engine."""
