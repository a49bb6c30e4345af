"""The OpenAI-compatible front end before prefill and decode servers; `vllm*` is the one before vLLM's own servers."""
