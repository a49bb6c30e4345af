"""Adapters by which engines use the daemon: what all of them share, and a folder for each engine."""
