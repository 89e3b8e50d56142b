"""Runs: started, kept on disk, resumed, joined by newcomers, and told to trackers."""
