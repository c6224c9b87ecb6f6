"""The operations of the transformer, one to a file."""
