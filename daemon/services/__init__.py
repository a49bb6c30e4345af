"""The gRPC services: each judges what comes in and hands it to a side; health is the daemon's own."""
