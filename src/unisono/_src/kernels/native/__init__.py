"""The kernels in C++, and their calls from traced programs.

`library` chooses the one that fits this processor.
"""
