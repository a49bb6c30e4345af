"""The courier: a child process with one NIXL agent and one session's slots, and its daemon's end of it."""
