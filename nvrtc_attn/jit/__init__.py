"""What is compiled: a config, its source and params, NVRTC in worker processes, the cache of what they made.

Imports ``base``, and of ``front`` the table of operands at most: a config is all that a compile knows of a problem.
"""
