"""What was asked: any framework's tensors as views, and one validated problem. Every user error is raised in here.

Imports ``base`` and numpy. No framework and no CUDA: tensors are read through what their own module has loaded.
"""
