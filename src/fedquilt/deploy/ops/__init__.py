"""Making, starting and watching a deployed federation: folders, keys, processes."""
