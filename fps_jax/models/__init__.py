"""What acts and what values: networks, distributions, statistics."""
