"""The two halves of a method on a real network: everything that knows Flower is in this package."""
