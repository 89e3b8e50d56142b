"""Layers with another body while they train, in the engine's own copy of a model, and what a model draws."""
