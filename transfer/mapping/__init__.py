"""Memory that two processes map, and the locks that prove that a process lives. Daemons and workers share it."""
