"""What methods and read-outs are written in: messages, steps, one client as they see it, and their two base classes."""
