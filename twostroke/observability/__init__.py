"""What a process says about itself: logs, metrics and profiles."""
