"""`sglang`: the engine strategy that runs SGLang's server."""
