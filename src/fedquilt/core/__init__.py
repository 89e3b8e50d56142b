"""The round: who is there, what they receive, train and send, what the server makes of it, and what came of it."""
