"""Values of points, and the gradients that are estimated from them."""
