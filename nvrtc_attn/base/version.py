"""The version of the package, apart so that a module may name it without importing the public functions."""

__version__ = "0.1.0"
