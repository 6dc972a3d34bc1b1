"""What a worker has measured: costs of steps, rates of links, seconds of pages, limits of the machine."""
