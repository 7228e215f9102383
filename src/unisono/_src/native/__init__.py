"""The kernels in C++: the library that fits this processor, and the calls of its kernels from traced programs."""
