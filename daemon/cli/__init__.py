"""The `kvferry` command: a module for each subcommand, and what only subcommands need."""
