"""A device's half of a deployed federation."""
