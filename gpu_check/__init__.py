"""What only a GPU can tell: whether the kernels are right there, and how near to its limits they
come. Needs torch, triton, transformers and numpy; no package of the serving layer, no model."""
