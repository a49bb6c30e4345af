"""The four gRPC services: each judges what comes in and hands it to a side."""
