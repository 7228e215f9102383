"""Products, sums and Fourier transforms. Their bits do not depend on the number of threads."""
