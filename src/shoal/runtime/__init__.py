"""What happens in a training process: joining, exchanging, stepping, launching."""
