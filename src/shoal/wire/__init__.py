"""What carries bytes between workers; it knows no technique."""
