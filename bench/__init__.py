"""What each part costs next to what one would use instead."""
