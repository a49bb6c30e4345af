"""The settings of a daemon: one model of all, where each value comes from, and which may not be together."""
