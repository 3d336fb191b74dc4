"""What the commands share: words for people, files they write, and what they need installed."""
