"""Request bodies and headers: checked, split, and written anew for each leg."""
