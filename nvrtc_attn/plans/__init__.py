"""One problem's launches, bound to loaded kernels: made, measured, compiled ahead, guessed ahead, checked.

Imports everything below it: this is where ``front``, ``heuristics``, ``jit`` and ``runtime`` meet.
"""
