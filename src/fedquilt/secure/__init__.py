"""Secure sums: the server learns a circle's weighted sum and nobody's copy (Bonawitz et al. 2017, Bell et al. 2020)."""

from fedquilt.secure.settings import SecureSums

__all__ = ["SecureSums"]
