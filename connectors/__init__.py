"""Adapters by which engines use the daemon: vLLM."""
