"""What the way into the drop directory costs and sustains: the gateway with its sink, and Spark behind it."""
