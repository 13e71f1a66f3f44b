"""Programmable attention: the user's own functions of a score and its position, traced into expressions.

Imports ``base`` alone, no framework: ``graph`` is the expression, ``recording``, ``proxy`` and ``trace`` make it from
functions, ``derivative`` derives it, ``evaluate`` computes it in NumPy, ``canonical`` finds what the options of a call
say already, ``cuda`` writes it in C++. A `Modifier` is what a call takes, its `Program` what decides the kernel.
"""
