"""The server's half of a deployed federation."""
