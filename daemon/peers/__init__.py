"""Other daemons: finding them, dialling, the handshake, sessions and what travels in them."""
