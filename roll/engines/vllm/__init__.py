"""`vllm`: an adapter to vLLM's asynchronous engine."""
