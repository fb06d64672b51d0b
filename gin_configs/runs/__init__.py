"""What to do with a pair."""
