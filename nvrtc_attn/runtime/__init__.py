"""What touches a GPU: the driver, devices, loaded kernels and their launches, tensor maps, memory and its lifetime.

Imports what is below: ``heuristics`` for what a tensor map says, ``jit`` for cubins, ``front`` for layouts, ``base``.
``driver`` and ``device`` import ``base`` alone, for the doctor. `driver` is the one module that calls CUDA's driver.
"""
