"""What a subscriber that never reads costs the others."""
