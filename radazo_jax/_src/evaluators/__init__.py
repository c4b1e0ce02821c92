"""Values of points: in one program, over a mesh, or by Python functions."""
