"""Attention in NumPy: what calls on CPU memory compute, and the oracle of the tests.

Imports ``front`` and ``base``, nothing that compiles or launches.
"""
