"""The tokens of the tokenizer that an engine names `synthetic`: workers without a model make them, fronts read them.

A token below 256 is that byte; what others stand for is the front end's business (front/chat.py).
"""

SYNTHETIC = "synthetic"  # in DescribeReply.tokenizer
VOCABULARY = 32_000
