"""The reference workers: prefill and decode around a model (`models`), or around none (`--synthetic`)."""
