"""Letters between the server and devices, as bytes and back."""
