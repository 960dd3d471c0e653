"""Parts of weights: boxes of a tensor (`boxes`), and tensors that record which box of them is read (`views`)."""
