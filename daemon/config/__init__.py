"""What a daemon is told: one model of all settings, where each value comes from, and what no two may be together."""
