"""The kernels in C++, and their calls from traced programs.

Also the choice of the library that fits this processor.
"""
