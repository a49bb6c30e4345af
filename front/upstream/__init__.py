"""The servers of vLLM as the front end finds and reaches them."""
