"""The web side: metrics, health and status over HTTP. It reads statistics and changes nothing."""
