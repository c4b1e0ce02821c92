"""What a law of random directions is, the laws, how a direction is held, and sums."""
