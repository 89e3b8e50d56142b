"""Models as rows: cut into units, compared, and clients of one architecture as a family."""
