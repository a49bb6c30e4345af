"""The host tier's rows: in memory or in a file that survives the daemon, their index, and how pages get there."""
