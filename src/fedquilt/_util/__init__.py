"""What the rest of the house leans on and no user types: files, text, numbers, names. It knows no other room."""
