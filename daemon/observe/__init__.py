"""What others see of a daemon: statistics, metrics, health, KV events. Nothing here changes what it serves."""
