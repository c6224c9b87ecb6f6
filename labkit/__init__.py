"""labkit: a transformer-systems laboratory. Importing it loads neither torch nor triton."""

__version__ = "0.1.0"
