"""A reply's first token from the prefill server, and the rest from decode."""
