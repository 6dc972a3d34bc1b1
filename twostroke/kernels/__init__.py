"""What a step computes besides matrix products, for each device, with torch references."""
