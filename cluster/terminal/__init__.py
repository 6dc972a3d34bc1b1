"""What a command tells people while it works: progress, warnings, and the banner with the commands to paste."""
