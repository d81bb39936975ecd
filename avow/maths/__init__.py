"""Mathematics on tensors: it knows rows, weights and rounding, and nothing of attention."""
