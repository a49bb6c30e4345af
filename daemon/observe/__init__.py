"""Views of a daemon for others: statistics, metrics, health, KV events. Nothing here changes what it serves."""
