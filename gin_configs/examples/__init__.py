"""Complete commands to start from."""
